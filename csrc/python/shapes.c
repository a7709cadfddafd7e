/* Types and shapes of tensors on any device, and their exchange between ranks before a call. */
#define PY_SSIZE_T_CLEAN
#include <string.h>

#include "binding.h"

bool look_at(PyObject *object, dl_tensor *d) {
    const dl_exchange_api *api = exchange_api_of(object);
    bool is_shown = api && !api->tensor_from_object(object, d);
    if (!is_shown) PyErr_Clear();
    return is_shown;
}

bool measure(PyObject *object, un_dtype *dtype, uint64_t *bytes) {
    if (PyList_Check(object) || PyTuple_Check(object)) {
        Py_ssize_t count = PySequence_Size(object);
        bool known = true;
        *dtype = 0;
        *bytes = 0;
        for (Py_ssize_t i = 0; known && i < count; i++) {
            PyObject *item = PySequence_GetItem(object, i);
            uint64_t more;
            known = item && measure(item, dtype, &more);
            if (known) *bytes += more;
            Py_XDECREF(item);
        }
        PyErr_Clear();
        return known;
    }
    dl_tensor d;
    if (!look_at(object, &d)) return false;
    *dtype = un_dtype_of(d.dtype.code, d.dtype.bits, d.dtype.lanes);
    *bytes = ((uint64_t)d.dtype.bits * d.dtype.lanes + 7) / 8;
    for (int i = 0; i < d.dims; i++) *bytes *= (uint64_t)d.shape[i];
    return true;
}

/* -- types and shapes ------------------------------------------------------------------------ */

void describe(int64_t *to, const dl_tensor *d, size_t most_dims) {
    to[DTYPE] = un_dtype_of(d->dtype.code, d->dtype.bits, d->dtype.lanes);
    to[DIMS] = d->dims;
    if (d->dims && (size_t)d->dims <= most_dims)
        memcpy(to + LENGTHS, d->shape, (size_t)d->dims * sizeof *to);
}

PyObject *as_tuple(const int64_t *integers, size_t count) {
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; tuple && i < count; i++) {
        PyObject *item = PyLong_FromLongLong(integers[i]);
        if (!item || PyTuple_SetItem(tuple, (Py_ssize_t)i, item)) Py_CLEAR(tuple);
    }
    return tuple;
}

PyObject *ranks_in(const Group *self, const bool *chosen) {
    int64_t ranks[UN_MAX_RANKS];
    size_t count = 0;
    for (int rank = 0; rank < self->ranks; rank++)
        if (chosen[rank]) ranks[count++] = rank;
    return as_tuple(ranks, count);
}

typedef struct integers {
    int64_t *items;
    size_t count, room;
} integers;

static bool append(integers *row, PyObject *object) {
    dl_tensor d;
    if (!look_at(object, &d)) return false;
    size_t count = row->count + LENGTHS + (size_t)d.dims;
    if (count > row->room) {
        int64_t *items = PyMem_Realloc(row->items, 2 * count * sizeof *items);
        if (!items) return false;
        *row = (integers){items, row->count, 2 * count};
    }
    describe(row->items + row->count, &d, (size_t)d.dims);
    row->count = count;
    return true;
}

/* describe_shapes(list): all its tensors in integers, as bytes, and the index of the first of each
 * type. None if DLPack cannot tell, or there are too many types. */
PyObject *module_describe_shapes(PyObject *module, PyObject *list) {
    (void)module;
    if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "tensors must be a list");
    enum { FEW = 16 };
    int64_t dtypes[FEW], places[FEW];
    size_t kinds = 0;
    integers row = {0};
    bool known = true;
    for (Py_ssize_t i = 0; known && i < PyList_Size(list); i++) {
        size_t at = row.count, kind = 0;
        if (!(known = append(&row, PyList_GetItem(list, i)))) break;
        while (kind < kinds && dtypes[kind] != row.items[at + DTYPE]) kind++;
        if (kind < kinds) continue;
        if (!(known = kinds < FEW)) break;
        dtypes[kinds] = row.items[at + DTYPE];
        places[kinds++] = i;
    }
    PyObject *result = NULL;
    if (known)
        result = Py_BuildValue("(y#N)", row.items ? (const char *)row.items : "",
                               (Py_ssize_t)(row.count * sizeof(int64_t)), as_tuple(places, kinds));
    PyMem_Free(row.items);
    return known ? result : Py_NewRef(Py_None);
}

/* -- a few integers from every rank ---------------------------------------------------------- */

un_stream *streams_of_rows(const Group *self, char *rows, size_t bytes) {
    size_t ranks = (size_t)self->ranks;
    un_stream *streams = PyMem_Malloc(ranks * (sizeof *streams + sizeof(un_view)));
    if (!streams) return (un_stream *)PyErr_NoMemory();
    un_view *views = (un_view *)(streams + ranks);
    for (size_t rank = 0; rank < ranks; rank++) {
        views[rank] = (un_view){.data = rows + rank * bytes, .bytes = bytes};
        streams[rank] = (un_stream){.views = &views[rank], .count = 1, .bytes = bytes};
    }
    return streams;
}

int gather_integers(Group *self, const int64_t *mine, size_t count, int64_t *rows,
                    int64_t timeout_ns) {
    size_t bytes = count * sizeof *mine;
    un_view view = {.data = (char *)(uintptr_t)mine, .bytes = bytes};
    un_stream stream = {.views = &view, .count = 1, .bytes = bytes};
    un_call call = {.operation = UN_ALL_GATHER,
                    .dtype = un_dtype_of(UN_UINT, 8, 1),
                    .input = &stream,
                    .output = streams_of_rows(self, (char *)rows, bytes),
                    .timeout_ns = timeout_ns};
    int status = call.output ? enter_engine(self, un_run, &call, true) : -1;
    PyMem_Free((void *)(uintptr_t)call.output);
    return status;
}

/* exchange(tuple of integers, timeout_ns, or 0 for the group's): a list of all ranks' tuples, all of
 * one length; or a status. */
PyObject *group_exchange(PyObject *object, PyObject *const *arguments, Py_ssize_t passed) {
    Group *self = (Group *)object;
    PyObject *given = passed == 2 ? arguments[0] : NULL;
    if (!given || !PyTuple_Check(given))
        return PyErr_Format(PyExc_TypeError, "exchange takes a tuple and a timeout");
    int64_t timeout_ns = PyLong_AsLongLong(arguments[1]);
    size_t count = (size_t)PyTuple_Size(given), ranks = (size_t)self->ranks;
    int64_t *mine = PyMem_Malloc((ranks + 1) * count * sizeof *mine);
    if (!mine) return PyErr_NoMemory();
    for (size_t i = 0; i < count; i++)
        mine[i] = PyLong_AsLongLong(PyTuple_GetItem(given, (Py_ssize_t)i));
    int64_t *theirs = mine + count;
    int status = PyErr_Occurred() ? -1 : gather_integers(self, mine, count, theirs, timeout_ns);
    PyObject *result = status > 0 ? PyLong_FromLong(status)
                       : status   ? NULL
                                  : PyList_New(self->ranks);
    for (size_t rank = 0; !status && result && rank < ranks; rank++) {
        PyObject *tuple = as_tuple(theirs + rank * count, count);
        if (!tuple || PyList_SetItem(result, (Py_ssize_t)rank, tuple)) Py_CLEAR(result);
    }
    PyMem_Free(mine);
    return result;
}
