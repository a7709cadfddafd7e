/* UCX, and groups over several hosts. */
#include <stdlib.h>

#include "binding.h"

/* load_ucx(path): its version, three numbers */
PyObject *module_load_ucx(PyObject *module, PyObject *path) {
    (void)module;
    const char *text = PyUnicode_AsUTF8AndSize(path, NULL);
    unsigned version[3];
    const char *problem = text ? un_ucx_load(text, version) : NULL;
    if (!text) return NULL;
    if (problem) return PyErr_Format(PyExc_OSError, "%s", problem);
    return Py_BuildValue("III", version[0], version[1], version[2]);
}

/* open_network([(name, value), ...]): the address of this process's worker */
PyObject *module_open_network(PyObject *module, PyObject *settings) {
    (void)module;
    Py_ssize_t count = PyList_Size(settings);
    const char **texts = count < 0 ? NULL : calloc(2 * (size_t)count + 1, sizeof *texts);
    if (!texts) return count < 0 ? NULL : PyErr_NoMemory();
    bool read = true;
    for (Py_ssize_t i = 0; read && i < count; i++)
        read = PyArg_ParseTuple(PyList_GetItem(settings, i), "ss", &texts[2 * i],
                                &texts[2 * i + 1]);
    const char *problem = NULL;
    const void *address = NULL;
    size_t bytes = 0;
    if (read) {
        Py_BEGIN_ALLOW_THREADS problem = un_network_open(texts, &address, &bytes);
        Py_END_ALLOW_THREADS
    }
    free(texts);
    if (!read) return NULL;
    if (problem) return PyErr_Format(PyExc_OSError, "UCX: %s", problem);
    return PyBytes_FromStringAndSize(address, (Py_ssize_t)bytes);
}

PyObject *module_close_network(PyObject *module, PyObject *ignored) {
    (void)module, (void)ignored;
    Py_BEGIN_ALLOW_THREADS un_network_close();
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

/* span(local, hosts, key, workers); `local` is closed with this group */
PyObject *group_span(PyObject *object, PyObject *arguments) {
    Group *self = (Group *)object, *local;
    PyObject *hosts, *workers;
    unsigned long long key;
    if (!PyArg_ParseTuple(arguments, "O!OKO", Py_TYPE(object), &local, &hosts, &key, &workers))
        return NULL;
    int host_of[UN_MAX_RANKS];
    const void *where[UN_MAX_RANKS];
    size_t bytes[UN_MAX_RANKS];
    uint64_t own_proofs[UN_MAX_RANKS], proofs[UN_MAX_RANKS];
    for (Py_ssize_t rank = 0; rank < self->ranks; rank++) {
        PyObject *number = PySequence_GetItem(hosts, rank),
                 *worker = PySequence_GetItem(workers, rank);
        PyObject *address = NULL;
        char *text = NULL;
        Py_ssize_t length = 0;
        unsigned long long own = 0, theirs = 0;
        host_of[rank] = number ? (int)PyLong_AsLong(number) : -1;
        bool read = worker && PyArg_ParseTuple(worker, "SKK", &address, &own, &theirs) &&
                    !PyBytes_AsStringAndSize(address, &text, &length);
        where[rank] = text; /* which lives as long as the caller's sequence */
        bytes[rank] = (size_t)length;
        own_proofs[rank] = own;
        proofs[rank] = theirs;
        Py_XDECREF(number);
        Py_XDECREF(worker);
        if (!read || PyErr_Occurred()) return NULL;
    }
    if (!self->group || !local->group) return PyErr_Format(PyExc_ValueError, "a group is closed");
    un_span span = {.key = key,
                    .hosts = host_of,
                    .addresses = where,
                    .address_bytes = bytes,
                    .own_proofs = own_proofs,
                    .proofs = proofs};
    if (un_group_span(self->group, local->group, &span)) return PyErr_SetFromErrno(PyExc_OSError);
    local->group = NULL;
    Py_RETURN_NONE;
}

/* meet(seconds, asks): the ranks that have not arrived */
PyObject *group_meet(PyObject *object, PyObject *arguments) {
    Group *self = (Group *)object;
    double limit;
    int asks;
    if (!PyArg_ParseTuple(arguments, "dp", &limit, &asks)) return NULL;
    if (!self->group || self->closing) return PyErr_Format(PyExc_ValueError, "the group is closed");
    bool missing[UN_MAX_RANKS] = {0};
    PyThreadState *parked = NULL;
    un_call hooks = hooks_for(&parked, 0);
    self->users++;
    un_group_meet(self->group, (int64_t)(limit * 1e9), &hooks, asks, missing);
    end_use(self, parked);
    if (PyErr_Occurred()) return NULL;
    return ranks_in(self, missing);
}

/* lose(rank, is_silent): its process, on another host, has ended or does not answer */
PyObject *group_lose(PyObject *object, PyObject *arguments) {
    Group *self = (Group *)object;
    int rank, is_silent;
    if (!PyArg_ParseTuple(arguments, "ip", &rank, &is_silent)) return NULL;
    self->users++;
    PyThreadState *parked = PyEval_SaveThread();
    if (self->group) un_group_lose(self->group, rank, is_silent);
    end_use(self, parked);
    Py_RETURN_NONE;
}

/* leave(rank): its process, on another host, has left all groups cleanly */
PyObject *group_leave(PyObject *object, PyObject *rank) {
    Group *self = (Group *)object;
    long number = PyLong_AsLong(rank);
    if (PyErr_Occurred()) return NULL;
    if (self->group) un_group_leave(self->group, (int)number);
    Py_RETURN_NONE;
}
