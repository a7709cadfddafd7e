/* What only torch knows about a tensor. */
#include "tensors.h"

/* torch can flip signs lazily: x.conj() and x.conj().imag share x's memory, and only a bit says
 * that the values differ. DLPack's fast interface does not tell, so we ask torch; but asking
 * takes longer than all the rest, and a real tensor with that bit is nearly always strided or
 * has one element: others are asked only when they are new. */
static bool is_lazy(PyObject *object, const tensor *t, unsigned code, bool is_new) {
    bool conjugable = code == UN_COMPLEX;
    bool negatable = is_new || (code == UN_FLOAT && (t->layout || t->bytes == t->item_bytes));
    static PyObject *questions[2]; /* interned: a new string for each call doubles the time */
    for (int i = 0; i < 2; i++) {
        if (!(conjugable || (i && negatable))) continue;
        if (!questions[i]) questions[i] = PyUnicode_InternFromString(i ? "is_neg" : "is_conj");
        PyObject *lazy = questions[i] ? PyObject_CallMethodObjArgs(object, questions[i], NULL)
                                      : NULL;
        if (!lazy) PyErr_Clear(); /* not a torch tensor, so not lazy */
        Py_XDECREF(lazy);
        if (lazy == Py_True) return true;
    }
    return false;
}

/* Call a method without arguments that returns a number. */
static bool ask_number(PyObject *object, const char *name, size_t *number) {
    PyObject *answer = object ? PyObject_CallMethod(object, name, NULL) : NULL;
    if (answer) *number = PyLong_AsSize_t(answer);
    Py_XDECREF(answer);
    return answer && !PyErr_Occurred();
}

/* A tensor whose storage was checked. If it still has the same address it need not be checked
 * again, since a storage that shrinks moves. */
typedef struct asked {
    const void *object;
    const char *first, *end;
} asked;

/* Where to cache it: one of two in its set. */
static asked *set_of(const asked *a) {
    static asked sets[2048][2];
    uint64_t mixed = ((uintptr_t)a->object ^ (uintptr_t)a->first << 20) * 0x9e3779b97f4a7c15u;
    return sets[mixed >> 53];
}

static bool is_same(const asked *a, const asked *b) {
    return a->object == b->object && a->first == b->first && a->end == b->end;
}

/* torch lets a storage shrink under its tensors (untyped_storage().resize_), which then claim
 * more memory than there is. */
static int check_storage(PyObject *object, const asked *needed) {
    size_t begin, bytes;
    PyObject *storage = PyObject_CallMethod(object, "untyped_storage", NULL);
    bool knows = ask_number(storage, "data_ptr", &begin) && ask_number(storage, "nbytes", &bytes);
    Py_XDECREF(storage);
    if (!knows) { /* not a torch tensor */
        PyErr_Clear();
        return 0;
    }
    if ((uintptr_t)needed->first >= begin && (uintptr_t)needed->end <= begin + bytes) return 0;
    return REFUSED;
}

int check_with_torch(PyObject *object, const tensor *t, unsigned code) {
    asked now = {object, t->data, t->data + t->bytes};
    if (t->layout) {
        extent whole = extent_of(t->data, t->layout, t->bytes);
        now = (asked){object, whole.first, whole.end};
    }
    asked *set = set_of(&now);
    bool is_new = !is_same(&set[0], &now) && !is_same(&set[1], &now);
    if (is_new && check_storage(object, &now)) return REFUSED;
    if (is_lazy(object, t, code, is_new)) return LAZY;
    if (is_new) {
        set[1] = set[0];
        set[0] = now;
    }
    return 0;
}

/* A function of unisono.comm.on_rows.rows with one argument or two. */
static PyObject *call_rows(const char *name, PyObject *first, PyObject *second) {
    PyObject *rows = PyImport_ImportModule("unisono.comm.on_rows.rows");
    PyObject *function = rows ? PyObject_GetAttrString(rows, name) : NULL;
    PyObject *result = function ? PyObject_CallFunctionObjArgs(function, first, second, NULL)
                                : NULL;
    Py_XDECREF(rows);
    Py_XDECREF(function);
    return result;
}

COLD PyObject *resolve(PyObject *lazy) { return call_rows("resolve", lazy, NULL); }

COLD void write_resolved(PyObject *lazy, PyObject *resolved) {
    PyObject *type, *value, *traceback; /* of a refused call */
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *done = call_rows("write_resolved", lazy, resolved);
    if (!done) PyErr_WriteUnraisable(lazy);
    Py_XDECREF(done);
    PyErr_Restore(type, value, traceback);
}
