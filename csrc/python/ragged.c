/* Gathering tensors whose shapes only their owners know. */
#include <string.h>

#include "binding.h"

enum {
    SHORT_DIMS = 8,
    MOST_DIMS = 64 /* torch allows no more; exchanged only if a rank has more than a few */
};

/* What a rank publishes about its tensor. */
typedef struct head {
    int64_t bytes; /* -1: too long to come along */
    int64_t shape[LENGTHS + SHORT_DIMS];
} head;

_Static_assert(sizeof(head) <= UN_HEAD_BYTES, "a head is too long");

typedef struct gathering {
    un_ragged ragged; /* first: the engine passes it back to us */
    Group *group;
    PyObject *given, *empty_like, *empty; /* our tensor, and how to make others */
    int root;                             /* the rank that gathers; -1: all ranks */
    bool is_wanted, is_plain;             /* by us; ours is contiguous */
    head *heads;                          /* ours first, then all ranks' */
    bool have_all_come, are_all_short;
    PyObject *outputs; /* a list; NULL: none were made */
    un_stream *tails;  /* in these */
} gathering;

static const head *head_of(const gathering *g, int rank) { return &g->heads[1 + rank]; }

static bool is_like_ours(const gathering *g, const head *theirs) {
    size_t integers = LENGTHS + (size_t)theirs->shape[DIMS];
    return !memcmp(theirs->shape, g->heads->shape, integers * sizeof *theirs->shape);
}

/* A tensor for a rank's data. torch has several ways to make one; use the fastest in each case. */
static PyObject *make_output(const gathering *g, const head *theirs) {
    if (g->is_plain && is_like_ours(g, theirs))
        return PyObject_CallFunctionObjArgs(g->empty_like, g->given, NULL);
    PyObject *shape = as_tuple(theirs->shape + LENGTHS, (size_t)theirs->shape[DIMS]), *made = NULL;
    if (shape && theirs->shape[DTYPE] == g->heads->shape[DTYPE] && theirs->shape[DIMS]) {
        static PyObject *name;
        if (!name) name = PyUnicode_InternFromString("new_empty");
        PyObject *new_empty = name ? PyObject_GetAttr(g->given, name) : NULL;
        made = new_empty ? PyObject_Call(new_empty, shape, NULL) : NULL;
        Py_XDECREF(new_empty);
    } else if (shape) {
        made = PyObject_CallFunction(g->empty, "OLO", g->given, (long long)theirs->shape[DTYPE],
                                     shape);
    }
    Py_XDECREF(shape);
    return made;
}

/* The memory of a tensor that was just made, and so needs no checks; NULL: a wrong tensor. */
static char *memory_of(PyObject *made, const head *wanted) {
    dl_tensor d;
    if (!look_at(made, &d) || d.device.type != DLPACK_CPU || d.dims != wanted->shape[DIMS])
        return NULL;
    int64_t bytes = ((int64_t)d.dtype.bits * d.dtype.lanes + 7) / 8, items = 1;
    for (int dim = d.dims; dim--; items *= d.shape[dim])
        if (d.shape[dim] != wanted->shape[LENGTHS + dim] ||
            (d.strides && d.shape[dim] > 1 && d.strides[dim] != items))
            return NULL;
    return items * bytes == wanted->bytes ? (char *)d.data + d.byte_offset : NULL;
}

static bool make_outputs(gathering *g) {
    int ranks = g->group->ranks;
    g->outputs = PyList_New(ranks);
    g->tails = streams_of_rows(g->group, NULL, 0);
    for (int rank = 0; g->outputs && g->tails && rank < ranks; rank++) {
        const head *theirs = head_of(g, rank);
        PyObject *output = make_output(g, theirs);
        if (!output || PyList_SetItem(g->outputs, rank, output)) return false;
        if (!theirs->bytes) continue;
        un_view *view = (un_view *)(uintptr_t)g->tails[rank].views;
        *view = (un_view){.data = memory_of(output, theirs), .bytes = (size_t)theirs->bytes};
        g->tails[rank].bytes = view->bytes;
        if (view->data) continue;
        PyErr_SetString(PyExc_ValueError, "torch made another tensor than requested");
        return false;
    }
    return g->outputs && g->tails;
}

/* All heads have arrived: read them, and make tensors. The engine still has the call lock, so no
 * other thread's call can come between. */
static const un_stream *open_heads(const un_ragged *ragged) {
    gathering *g = (gathering *)(uintptr_t)ragged;
    size_t total = 0;
    g->have_all_come = g->are_all_short = true;
    for (int rank = 0; rank < g->group->ranks; rank++) {
        const head *theirs = head_of(g, rank);
        if (theirs->bytes < 0 ||
            theirs->bytes > (int64_t)(g->group->group ? un_group_most_along(g->group->group) : 0))
            g->have_all_come = false;
        if (theirs->shape[DIMS] > SHORT_DIMS) g->are_all_short = false;
        total += (size_t)theirs->bytes;
    }
    if (!g->have_all_come || !g->are_all_short || !g->is_wanted) return NULL;
    PyThreadState **parked = ragged->call.argument;
    if (*parked) PyEval_RestoreThread(*parked);
    *parked = NULL;
    bool made = make_outputs(g);
    if (made && total > SMALL_BYTES) release_gil(parked);
    return made ? g->tails : NULL;
}

/* (type, shape) of each rank's tensor, from rows of so many integers */
static PyObject *tell_shapes(const Group *self, const int64_t *rows, size_t apart) {
    PyObject *shapes = PyList_New(self->ranks);
    for (Py_ssize_t rank = 0; shapes && rank < self->ranks; rank++) {
        const int64_t *integers = rows + (size_t)rank * apart;
        PyObject *lengths = as_tuple(integers + LENGTHS, (size_t)integers[DIMS]);
        PyObject *shape = lengths ? Py_BuildValue("(LN)", (long long)integers[DTYPE], lengths)
                                  : NULL;
        if (!shape || PyList_SetItem(shapes, rank, shape)) Py_CLEAR(shapes);
    }
    return shapes;
}

/* Exchange shapes with room for all dimensions, in a separate call. */
static PyObject *exchange_long_shapes(Group *self, PyObject *given) {
    enum { COUNT = LENGTHS + MOST_DIMS };
    int64_t mine[COUNT] = {0};
    dl_tensor d;
    if (look_at(given, &d)) describe(mine, &d, MOST_DIMS);
    int64_t *rows = PyMem_Malloc((size_t)self->ranks * sizeof mine);
    if (!rows) return PyErr_NoMemory();
    int status = gather_integers(self, mine, COUNT, rows, 0);
    PyObject *result = NULL;
    if (!status) result = tell_shapes(self, rows, COUNT);
    if (status > 0) result = PyLong_FromLong(status);
    PyMem_Free(rows);
    return result;
}

/* The result: the tensors, or all ranks' shapes, or None where neither is needed. */
static PyObject *tell_result(gathering *g) {
    if (g->outputs) return Py_BuildValue("(OO)", g->outputs, Py_None);
    if (g->have_all_come && g->are_all_short) return Py_BuildValue("(OO)", Py_None, Py_None);
    PyObject *shapes = g->are_all_short ? tell_shapes(g->group, head_of(g, 0)->shape,
                                                      sizeof(head) / sizeof(int64_t))
                                        : exchange_long_shapes(g->group, g->given);
    if (!shapes || !PyList_Check(shapes)) return shapes;
    return Py_BuildValue("(ON)", Py_None, shapes);
}

/* Our tensor is read, and the heads have room: make the call. */
static PyObject *run_gathering(gathering *g, const tensor *t, const un_view *elements) {
    Group *self = g->group;
    un_ragged *r = &g->ragged;
    un_view head_view = {.data = (char *)g->heads, .bytes = sizeof(head)};
    r->head = (un_stream){.views = &head_view, .count = 1, .bytes = sizeof(head)};
    r->comes_along = g->heads->bytes >= 0 &&
                     g->heads->bytes <=
                         (int64_t)(self->group ? un_group_most_along(self->group) : 0);
    r->tail = (un_stream){0};
    if (g->heads->bytes >= 0)
        r->tail = (un_stream){.views = elements, .count = 1, .bytes = t->bytes};
    r->heads = streams_of_rows(self, (char *)(g->heads + 1), sizeof(head));
    r->open = open_heads;
    r->call = (un_call){.operation = g->root < 0 ? UN_ALL_GATHER : UN_GATHER,
                        .root = g->root < 0 ? 0 : g->root,
                        .dtype = (un_dtype)g->heads->shape[DTYPE],
                        .input = &r->tail};
    bool is_small = !r->comes_along || r->tail.bytes <= SMALL_BYTES;
    int status = r->heads ? enter_engine(self, un_gather_ragged, &r->call, is_small) : -1;
    PyObject *result = status > 0 ? PyLong_FromLong(status) : NULL;
    if (!status) result = tell_result(g);
    PyMem_Free(r->heads);
    return result;
}

/* gather_ragged(tensor, root, empty_like, empty): (a list of all ranks' tensors, None) on the
 * root or, if that is -1, on every rank; (None, all types and shapes) if not all tensors are
 * small; (None, None) if all are and this rank wants none. Or a status; or None if DLPack cannot
 * export the tensor, and then no rank has seen the call. `empty(tensor, type, shape)` makes a
 * tensor on the device of another. */
PyObject *group_gather_ragged(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 4) return PyErr_Format(PyExc_TypeError, "gather_ragged takes 4 arguments");
    gathering g;
    g.group = (Group *)object;
    g.given = arguments[0];
    g.root = (int)PyLong_AsLong(arguments[1]);
    g.is_wanted = g.root < 0 || g.root == g.group->rank;
    g.empty_like = arguments[2];
    g.empty = arguments[3];
    g.outputs = NULL;
    g.tails = NULL;
    dl_tensor d;
    if (!look_at(g.given, &d) || d.dims > MOST_DIMS) Py_RETURN_NONE;
    g.heads = PyMem_Calloc(1 + (size_t)g.group->ranks, sizeof *g.heads);
    if (!g.heads) return PyErr_NoMemory();
    tensor t;
    un_view elements;
    start_tensor(&t);
    bool is_read = !read_one(&t, &elements, g.given, false);
    PyErr_Clear(); /* the code that moves the tensor reports what is wrong with it */
    g.heads->bytes = is_read ? (int64_t)t.bytes : -1;
    g.is_plain = is_read && !t.layout && !t.owner;
    describe(g.heads->shape, &d, SHORT_DIMS);
    PyObject *result = run_gathering(&g, &t, &elements);
    free_tensor(&t);
    PyMem_Free(g.tails);
    Py_XDECREF(g.outputs);
    PyMem_Free(g.heads);
    return result;
}
