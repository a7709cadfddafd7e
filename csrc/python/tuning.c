/* The numbers by which a group is tuned, for Python: tuples in the order of un_tuning. */
#include "binding.h"

static PyObject *tuning_as_tuple(un_tuning t) {
    return Py_BuildValue("nnnnnnnn", (Py_ssize_t)t.cut_from, (Py_ssize_t)t.direct_from,
                         (Py_ssize_t)t.bypass_from, (Py_ssize_t)t.all_reduce_turn,
                         (Py_ssize_t)t.broadcast_turn, (Py_ssize_t)t.all_gather_turn,
                         (Py_ssize_t)t.reduce_scatter_turn, (Py_ssize_t)t.all_to_all_turn);
}

/* tune(...): the numbers of `tuning`, in its order */
PyObject *group_tune(PyObject *object, PyObject *arguments) {
    Group *self = (Group *)object;
    Py_ssize_t n[8];
    if (!PyArg_ParseTuple(arguments, "nnnnnnnn", &n[0], &n[1], &n[2], &n[3], &n[4], &n[5], &n[6],
                          &n[7]))
        return NULL;
    un_tuning t = {.cut_from = (size_t)n[0],
                   .direct_from = (size_t)n[1],
                   .bypass_from = (size_t)n[2],
                   .all_reduce_turn = (size_t)n[3],
                   .broadcast_turn = (size_t)n[4],
                   .all_gather_turn = (size_t)n[5],
                   .reduce_scatter_turn = (size_t)n[6],
                   .all_to_all_turn = (size_t)n[7]};
    if (self->group && !un_group_tune(self->group, &t)) {
        PyErr_SetString(PyExc_ValueError, "a tuning out of bounds");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* The numbers of un_tuning, in its order; None once closed. */
PyObject *group_tuning(PyObject *object, void *ignored) {
    (void)ignored;
    Group *self = (Group *)object;
    if (!self->group) Py_RETURN_NONE;
    return tuning_as_tuple(un_group_tuning(self->group));
}

PyObject *group_is_crowded(PyObject *object, void *ignored) {
    (void)ignored;
    Group *self = (Group *)object;
    return PyBool_FromLong(self->group && un_group_is_crowded(self->group));
}

/* default_tuning(ranks, crowded) */
PyObject *module_default_tuning(PyObject *module, PyObject *arguments) {
    (void)module;
    int ranks, crowded;
    if (!PyArg_ParseTuple(arguments, "ip", &ranks, &crowded)) return NULL;
    if (ranks < 1) return PyErr_Format(PyExc_ValueError, "no ranks");
    return tuning_as_tuple(un_default_tuning(ranks, crowded));
}
