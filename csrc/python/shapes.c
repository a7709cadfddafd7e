/* What tensors are, wherever they lie, and what ranks tell each other of that before a call. */
#define PY_SSIZE_T_CLEAN
#include <string.h>

#include "binding.h"

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
    const dl_exchange_api *api = exchange_api_of(object);
    dl_tensor d;
    if (!api || api->tensor_from_object(object, &d)) {
        PyErr_Clear();
        return false;
    }
    *dtype = un_dtype_of(d.dtype.code, d.dtype.bits, d.dtype.lanes);
    *bytes = ((uint64_t)d.dtype.bits * d.dtype.lanes + 7) / 8;
    for (int i = 0; i < d.dims; i++) *bytes *= (uint64_t)d.shape[i];
    return true;
}

/* -- types and shapes ------------------------------------------------------------------------ */

enum { DTYPE, DIMS, LENGTHS }; /* a tensor in integers: type, number of dimensions, their lengths */

static bool look_at(PyObject *object, dl_tensor *d) {
    const dl_exchange_api *api = exchange_api_of(object);
    bool is_shown = api && !api->tensor_from_object(object, d);
    if (!is_shown) PyErr_Clear();
    return is_shown;
}

/* With the lengths of up to so many dimensions. */
static void describe(int64_t *to, const dl_tensor *d, size_t most_dims) {
    to[DTYPE] = un_dtype_of(d->dtype.code, d->dtype.bits, d->dtype.lanes);
    to[DIMS] = d->dims;
    if (d->dims && (size_t)d->dims <= most_dims)
        memcpy(to + LENGTHS, d->shape, (size_t)d->dims * sizeof *to);
}

static PyObject *as_tuple(const int64_t *integers, size_t count) {
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; tuple && i < count; i++) {
        PyObject *item = PyLong_FromLongLong(integers[i]);
        if (!item || PyTuple_SetItem(tuple, (Py_ssize_t)i, item)) Py_CLEAR(tuple);
    }
    return tuple;
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

/* Whether no object is there twice. */
static bool are_distinct(PyObject *list) {
    size_t count = (size_t)PyList_Size(list), room = 64;
    while (room < 2 * count) room *= 2;
    PyObject **seen = PyMem_Calloc(room, sizeof *seen);
    bool distinct = seen != NULL;
    for (size_t i = 0; distinct && i < count; i++) {
        PyObject *object = PyList_GetItem(list, (Py_ssize_t)i);
        size_t at = ((uintptr_t)object * 0x9e3779b97f4a7c15u >> 20) & (room - 1);
        while (seen[at] && seen[at] != object) at = (at + 1) & (room - 1);
        distinct = !seen[at];
        seen[at] = object;
    }
    PyMem_Free(seen);
    return distinct;
}

/* describe_shapes(list): all its tensors in integers, as bytes, the places of the first of each
 * type, and whether none is there twice. None where DLPack does not tell, or there are more types
 * than a few. */
PyObject *module_describe_shapes(PyObject *module, PyObject *list) {
    (void)module;
    if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "tensors are a list");
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
        result = Py_BuildValue("(y#NO)", row.items ? (const char *)row.items : "",
                               (Py_ssize_t)(row.count * sizeof(int64_t)), as_tuple(places, kinds),
                               are_distinct(list) ? Py_True : Py_False);
    PyMem_Free(row.items);
    return known ? result : Py_NewRef(Py_None);
}

/* -- a few integers from every rank ---------------------------------------------------------- */

/* Gather everybody's stream of bytes, in rows. A status, or -1 with an exception. */
static int gather_rows(Group *self, const un_stream *mine, char *rows) {
    enum { FEW = 16 };
    un_stream few_streams[FEW], *streams = few_streams;
    un_view few_views[FEW], *views = few_views;
    size_t ranks = (size_t)self->ranks;
    if (ranks > FEW) {
        streams = PyMem_Malloc(ranks * (sizeof *streams + sizeof *views));
        if (!streams) {
            PyErr_NoMemory();
            return -1;
        }
        views = (un_view *)(streams + ranks);
    }
    for (size_t rank = 0; rank < ranks; rank++) {
        views[rank] = (un_view){.data = rows + rank * mine->bytes, .bytes = mine->bytes};
        streams[rank] = (un_stream){.views = &views[rank], .count = 1, .bytes = mine->bytes};
    }
    un_call call = {.operation = UN_ALL_GATHER,
                    .dtype = un_dtype_of(UN_UINT, 8, 1),
                    .input = mine,
                    .output = streams};
    int status = enter_engine(self, un_run, &call, true);
    if (streams != few_streams) PyMem_Free(streams);
    return status;
}

static int gather_integers(Group *self, const int64_t *mine, size_t count, int64_t *rows) {
    size_t bytes = count * sizeof *mine;
    un_view view = {.data = (char *)(uintptr_t)mine, .bytes = bytes};
    un_stream stream = {.views = &view, .count = 1, .bytes = bytes};
    return gather_rows(self, &stream, (char *)rows);
}

/* exchange(tuple of integers): a list of every rank's, all of one length; or a status. */
PyObject *group_exchange(PyObject *object, PyObject *given) {
    Group *self = (Group *)object;
    if (!PyTuple_Check(given)) return PyErr_Format(PyExc_TypeError, "integers are a tuple");
    size_t count = (size_t)PyTuple_Size(given), ranks = (size_t)self->ranks;
    int64_t *mine = PyMem_Malloc((ranks + 1) * count * sizeof *mine);
    if (!mine) return PyErr_NoMemory();
    for (size_t i = 0; i < count; i++)
        mine[i] = PyLong_AsLongLong(PyTuple_GetItem(given, (Py_ssize_t)i));
    int64_t *theirs = mine + count;
    int status = PyErr_Occurred() ? -1 : gather_integers(self, mine, count, theirs);
    PyObject *result = status > 0 ? PyLong_FromLong(status) : status ? NULL : PyList_New(self->ranks);
    for (size_t rank = 0; !status && result && rank < ranks; rank++) {
        PyObject *tuple = as_tuple(theirs + rank * count, count);
        if (!tuple || PyList_SetItem(result, (Py_ssize_t)rank, tuple)) Py_CLEAR(result);
    }
    PyMem_Free(mine);
    return result;
}

/* -- everybody's shapes, and small tensors along with them ----------------------------------- */

enum {
    SHORT_DIMS = 8,
    MOST_DIMS = 64, /* torch knows no more; exchanged only where somebody has more than a few */
    MOST_ALONG = 8192,
    ROOM_UNIT = 64
};

/* What a rank gives. Tensors come first in a row, so that rows begin with elements. */
typedef struct gift {
    int64_t bytes; /* of the tensor; -1: it cannot come along */
    int64_t shape[LENGTHS + SHORT_DIMS];
} gift;

/* Give the tensor, if it fits into its room, and the gift behind it. */
static int give(Group *self, size_t room, const un_view *elements, gift *mine, char *rows) {
    static const char padding[MOST_ALONG];
    un_view views[3];
    un_stream stream = {.views = views};
    size_t bytes = mine->bytes >= 0 && (size_t)mine->bytes <= room ? elements->bytes : 0;
    if (bytes) views[stream.count++] = *elements;
    if (bytes < room)
        views[stream.count++] = (un_view){
            .data = (char *)(uintptr_t)padding, .bytes = room - bytes, .start = bytes};
    views[stream.count++] = (un_view){.data = (char *)mine, .bytes = sizeof *mine, .start = room};
    stream.bytes = room + sizeof *mine;
    return gather_rows(self, &stream, rows);
}

/* How much room there is next time. All ranks have seen the same gifts, and come to the same. */
static void plan_room(Group *self, size_t most) {
    size_t less = self->room - self->room / 8;
    if (most > MOST_ALONG || most < less) most = less;
    self->room = (most + ROOM_UNIT - 1) / ROOM_UNIT * ROOM_UNIT;
}

/* (type, shape) of a tensor in integers; None: as ours */
static PyObject *tell_shape(const int64_t *theirs, const int64_t *ours) {
    size_t dims = (size_t)theirs[DIMS];
    if (!memcmp(theirs, ours, (LENGTHS + dims) * sizeof *ours)) return Py_NewRef(Py_None);
    PyObject *shape = as_tuple(theirs + LENGTHS, dims);
    return shape ? Py_BuildValue("(LN)", (long long)theirs[DTYPE], shape) : NULL;
}

/* Everybody's shapes, which lie so many bytes apart. */
static PyObject *tell_shapes(const Group *self, const char *first, size_t apart,
                             const int64_t *ours) {
    PyObject *shapes = PyList_New(self->ranks);
    for (Py_ssize_t rank = 0; shapes && rank < self->ranks; rank++) {
        int64_t theirs[LENGTHS + MOST_DIMS];
        const char *from = first + (size_t)rank * apart;
        memcpy(theirs, from, LENGTHS * sizeof *theirs);
        memcpy(theirs, from, (LENGTHS + (size_t)theirs[DIMS]) * sizeof *theirs);
        PyObject *shape = tell_shape(theirs, ours);
        if (!shape || PyList_SetItem(shapes, rank, shape)) Py_CLEAR(shapes);
    }
    return shapes;
}

/* The same with room for all dimensions there are. */
static PyObject *exchange_long_shapes(Group *self, PyObject *given) {
    enum { COUNT = LENGTHS + MOST_DIMS };
    int64_t mine[COUNT] = {0};
    dl_tensor d;
    if (look_at(given, &d)) describe(mine, &d, MOST_DIMS);
    int64_t *rows = PyMem_Malloc((size_t)self->ranks * sizeof mine);
    if (!rows) return PyErr_NoMemory();
    int status = gather_integers(self, mine, COUNT, rows);
    PyObject *result = NULL;
    if (!status) result = tell_shapes(self, (const char *)rows, sizeof mine, mine);
    if (status > 0) result = PyLong_FromLong(status);
    PyMem_Free(rows);
    return result;
}

/* What the gifts say: the shapes, and the rows, or None where not all tensors have come along. */
static PyObject *open_gifts(Group *self, size_t room, const gift *mine, PyObject *given,
                            PyObject *rows) {
    size_t apart = room + sizeof *mine, most = 0;
    bool all_came = true, all_short = true;
    const char *first = PyByteArray_AsString(rows) + room;
    for (size_t rank = 0; rank < (size_t)self->ranks; rank++) {
        gift theirs;
        memcpy(&theirs, first + rank * apart, sizeof theirs);
        if (theirs.bytes < 0 || (size_t)theirs.bytes > room) all_came = false;
        if ((size_t)theirs.bytes > most) most = (size_t)theirs.bytes;
        if (theirs.shape[DIMS] > SHORT_DIMS) all_short = false;
    }
    plan_room(self, most);
    PyObject *shapes = all_short ? tell_shapes(self, first + sizeof mine->bytes, apart, mine->shape)
                                 : exchange_long_shapes(self, given);
    if (!shapes || !PyList_Check(shapes)) return shapes;
    return Py_BuildValue("(NO)", shapes, all_came ? rows : Py_None);
}

/* exchange_shapes(tensor): for each rank (type, shape) of its tensor, or None where those are ours;
 * and, where all tensors are small, rows of bytes that begin with their elements, or None. Or a
 * status; or None where DLPack does not show the tensor, and then no rank has heard of the call. */
PyObject *group_exchange_shapes(PyObject *object, PyObject *given) {
    Group *self = (Group *)object;
    dl_tensor d;
    if (!look_at(given, &d) || d.dims > MOST_DIMS) Py_RETURN_NONE;
    tensor t;
    un_view elements;
    start_tensor(&t);
    gift mine = {.bytes = read_one(&t, &elements, given, false) ? -1 : (int64_t)t.bytes};
    PyErr_Clear(); /* whoever moves the tensor will tell what is wrong with it */
    describe(mine.shape, &d, SHORT_DIMS);
    size_t room = self->room; /* other threads may change it while this one waits */
    Py_ssize_t bytes = self->ranks * (Py_ssize_t)(room + sizeof mine);
    PyObject *rows = PyByteArray_FromStringAndSize(NULL, bytes), *result = NULL;
    int status = rows ? give(self, room, &elements, &mine, PyByteArray_AsString(rows)) : -1;
    if (!status) result = open_gifts(self, room, &mine, given, rows);
    if (status > 0) result = PyLong_FromLong(status);
    free_tensor(&t);
    Py_XDECREF(rows);
    return result;
}

/* take(outputs, rows): what has come along, into a tensor in one piece for each rank */
PyObject *group_take(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    size_t ranks = (size_t)((Group *)object)->ranks;
    if (count != 2 || !PyList_Check(arguments[0]) || !PyByteArray_Check(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "take takes a list and rows of bytes");
    const char *rows = PyByteArray_AsString(arguments[1]);
    size_t row_bytes = (size_t)PyByteArray_Size(arguments[1]) / ranks;
    side s;
    start_side(&s);
    int failed = read_list(&s, arguments[0]);
    if (!failed && s.tensors != ranks) failed = 1;
    for (size_t i = 0; !failed && i < s.tensors; i++) {
        const tensor *t = &s.tensor[i];
        failed = t->layout || t->bytes > row_bytes;
        if (!failed && t->bytes) memcpy(t->data, rows + i * row_bytes, t->bytes);
    }
    free_side(&s);
    if (failed > 0) PyErr_SetString(PyExc_ValueError, "these are not the tensors of these rows");
    return failed ? NULL : Py_NewRef(Py_None);
}
