/* Calls that another library performs: their records, and comparing them before they begin. */
#include "binding.h"

typedef struct recorded_call {
    un_call call; /* first: the engine passes it back to us */
    uint64_t bytes;
    uint64_t number; /* of the call, or of its record */
} recorded_call;

/* (operation, reduction, root, dtype, bytes, number) */
static int read_recorded_call(recorded_call *r, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "a call takes 6 arguments");
        return -1;
    }
    *r = (recorded_call){.call = {.operation = (un_operation)PyLong_AsLong(arguments[0]),
                                  .reduction = (un_reduction)PyLong_AsLong(arguments[1]),
                                  .root = (int)PyLong_AsLong(arguments[2]),
                                  .dtype = (un_dtype)PyLong_AsUnsignedLong(arguments[3])},
                         .bytes = PyLong_AsUnsignedLongLong(arguments[4]),
                         .number = (uint64_t)PyLong_AsLongLong(arguments[5])};
    return PyErr_Occurred() ? -1 : 0;
}

/* record_open(operation, reduction, root, dtype, bytes, number): the record, with its site */
PyObject *group_record_open(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Group *self = (Group *)object;
    recorded_call r;
    if (read_recorded_call(&r, arguments, count)) return NULL;
    r.call.site = current_site();
    uint64_t record = self->group ? un_record_open(self->group, &r.call, r.bytes, r.number) : 0;
    return PyLong_FromUnsignedLongLong(record);
}

/* record_given(operation, tensors, options, number): the same for a call as torch describes it;
 * None if DLPack cannot export the tensors. */
PyObject *group_record_given(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Group *self = (Group *)object;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "record_given takes 4 arguments");
    un_call call = {.operation = (un_operation)PyLong_AsLong(arguments[0]), .root = -1};
    uint64_t number = PyLong_AsUnsignedLongLong(arguments[3]), bytes = 0;
    if (PyErr_Occurred()) return NULL;
    if (arguments[1] != Py_None && !measure(arguments[1], &call.dtype, &bytes)) Py_RETURN_NONE;
    int reduction = un_reduces(call.operation) ? given_reduction(arguments[2]) : UN_SUM;
    call.reduction = reduction < 0 ? UN_SUM : (un_reduction)reduction; /* short forms have none */
    if (un_is_rooted(call.operation)) call.root = given_root(arguments[2]);
    call.site = current_site();
    uint64_t record = self->group ? un_record_open(self->group, &call, bytes, number) : 0;
    return PyLong_FromUnsignedLongLong(record);
}

/* record_cover(whether): whether calls leave no records, as part of one that has its own */
PyObject *group_record_cover(PyObject *object, PyObject *whether) {
    Group *self = (Group *)object;
    if (self->group) un_record_cover(self->group, whether == Py_True);
    Py_RETURN_NONE;
}

/* record_end(record, status) */
PyObject *group_record_end(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Group *self = (Group *)object;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "record_end takes 2 arguments");
    uint64_t record = PyLong_AsUnsignedLongLong(arguments[0]);
    long status = PyLong_AsLong(arguments[1]);
    if (PyErr_Occurred()) return NULL;
    if (self->group) un_record_end(self->group, record, (un_status)status);
    Py_RETURN_NONE;
}

static un_status compare(un_group *group, const un_call *call) {
    const recorded_call *r = (const recorded_call *)call;
    return un_check(group, call, r->bytes, r->number);
}

/* check(operation, reduction, root, dtype, bytes, record): a status */
PyObject *group_check(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    recorded_call r;
    if (read_recorded_call(&r, arguments, count)) return NULL;
    int status = enter_engine((Group *)object, compare, &r.call, true);
    return status < 0 ? NULL : PyLong_FromLong(status);
}
