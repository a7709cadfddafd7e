/* Blocks as Python sees them: buffers for tensors and arrays, which keep them alive. */
#include <errno.h>
#include <stddef.h>

#include "binding.h"
#include <structmember.h>

typedef struct Block {
    PyObject_HEAD
    un_block *block;
    int ranks;
    PyObject *weak_references;
} Block;

static PyTypeObject *block_type;

/* Sizes from a sequence of integers, one for each of at most UN_MAX_RANKS ranks; how many, or
 * -1. */
static int read_sizes(PyObject *sequence, uint64_t sizes[UN_MAX_RANKS]) {
    Py_ssize_t count = PySequence_Size(sequence);
    if (count < 0) return -1;
    if (!count || count > UN_MAX_RANKS) {
        PyErr_SetString(PyExc_ValueError, "a block needs one size for each rank");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        sizes[i] = item ? PyLong_AsUnsignedLongLong(item) : 0;
        Py_XDECREF(item);
        if (PyErr_Occurred()) return -1;
    }
    return (int)count;
}

/* create_block(sizes): a descriptor */
PyObject *module_create_block(PyObject *module, PyObject *sequence) {
    (void)module;
    uint64_t sizes[UN_MAX_RANKS];
    int ranks = read_sizes(sequence, sizes);
    if (ranks < 0) return NULL;
    int descriptor = un_block_create(ranks, sizes);
    return descriptor < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLong(descriptor);
}

/* open_block(descriptor, sizes): a Block. MemoryError: the limits leave no room for our part. */
PyObject *group_open_block(PyObject *object, PyObject *arguments) {
    Group *self = (Group *)object;
    int descriptor;
    PyObject *sequence;
    uint64_t sizes[UN_MAX_RANKS];
    if (!PyArg_ParseTuple(arguments, "iO", &descriptor, &sequence)) return NULL;
    int ranks = read_sizes(sequence, sizes);
    if (ranks < 0) return NULL;
    if (!self->group || self->closing || ranks != self->ranks)
        return PyErr_Format(PyExc_ValueError, "the group is closed, or has another size");
    Block *made = (Block *)PyType_GenericAlloc(block_type, 0);
    if (!made) return NULL;
    made->ranks = ranks;
    self->users++;
    PyThreadState *parked = PyEval_SaveThread();
    un_status status = un_block_open(self->group, descriptor, sizes, &made->block);
    int error = errno;
    end_use(self, parked);
    if (!status) return (PyObject *)made;
    made->block = NULL;
    Py_DECREF((PyObject *)made);
    errno = error;
    if (status == UN_NO_MEMORY) return PyErr_NoMemory();
    if (status == UN_SYSTEM) return PyErr_SetFromErrno(PyExc_OSError);
    return PyErr_Format(PyExc_ValueError, "this is not the block that the ranks agreed on");
}

/* reopen_block(number): a Block that this rank has dropped and others have not, or None */
PyObject *group_reopen_block(PyObject *object, PyObject *number) {
    Group *self = (Group *)object;
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return NULL;
    if (!self->group || self->closing) Py_RETURN_NONE;
    Block *made = (Block *)PyType_GenericAlloc(block_type, 0);
    if (!made) return NULL;
    made->ranks = self->ranks;
    made->block = un_block_reopen(self->group, value);
    if (made->block) return (PyObject *)made;
    Py_DECREF((PyObject *)made);
    Py_RETURN_NONE;
}

/* use(number): all ranks have opened it, and calls may use it */
static PyObject *block_use(PyObject *object, PyObject *number) {
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return NULL;
    un_block_use(((Block *)object)->block, value);
    Py_RETURN_NONE;
}

/* part(rank): where a rank's part begins in the buffer, and its bytes */
static PyObject *block_part(PyObject *object, PyObject *number) {
    const Block *self = (const Block *)object;
    long rank = PyLong_AsLong(number);
    if (PyErr_Occurred()) return NULL;
    if (rank < 0 || rank >= self->ranks) return PyErr_Format(PyExc_IndexError, "no such rank");
    size_t bytes;
    const char *first = un_block_part(self->block, 0, &bytes);
    const char *data = un_block_part(self->block, (int)rank, &bytes);
    return Py_BuildValue("nn", (Py_ssize_t)(data - first), (Py_ssize_t)bytes);
}

/* The address of the buffer, which identifies tensors over it. */
static PyObject *block_address(PyObject *object, void *ignored) {
    (void)ignored;
    size_t bytes;
    return PyLong_FromVoidPtr(un_block_part(((Block *)object)->block, 0, &bytes));
}

static int get_buffer(PyObject *object, Py_buffer *view, int flags) {
    const Block *self = (const Block *)object;
    size_t bytes;
    char *first = un_block_part(self->block, 0, &bytes);
    char *last = un_block_part(self->block, self->ranks - 1, &bytes);
    return PyBuffer_FillInfo(view, object, first, last + bytes - first, 0, flags);
}

static void free_block(PyObject *object) {
    Block *self = (Block *)object;
    if (self->weak_references) PyObject_ClearWeakRefs(object);
    if (self->block) un_block_release(self->block);
    free_object(object);
}

/* pack_changes(old, new, bytes, item_bytes, to, room), addresses all: the packed bytes, or -1 */
PyObject *module_pack_changes(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_ssize_t old, new, bytes, size, to, room;
    if (!PyArg_ParseTuple(arguments, "nnnnnn", &old, &new, &bytes, &size, &to, &room)) return NULL;
    ptrdiff_t packed;
    Py_BEGIN_ALLOW_THREADS packed = un_pack_changes((char *)old, (const char *)new, (size_t)bytes,
                                                    (size_t)size, (char *)to, (size_t)room);
    Py_END_ALLOW_THREADS return PyLong_FromSsize_t(packed);
}

/* apply_changes(address, bytes, item_bytes, packed, length): whether they were valid */
PyObject *module_apply_changes(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_ssize_t at, bytes, size, from, length;
    if (!PyArg_ParseTuple(arguments, "nnnnn", &at, &bytes, &size, &from, &length)) return NULL;
    bool applied;
    Py_BEGIN_ALLOW_THREADS applied = un_apply_changes((char *)at, (size_t)bytes, (size_t)size,
                                                      (const char *)from, (size_t)length);
    Py_END_ALLOW_THREADS return PyBool_FromLong(applied);
}

/* share_pages(address, address of shared memory, or 0 for private pages, bytes): whether that
 * succeeded */
PyObject *module_share_pages(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_ssize_t at, shared, bytes;
    if (!PyArg_ParseTuple(arguments, "nnn", &at, &shared, &bytes)) return NULL;
    return PyBool_FromLong(un_share_pages((char *)at, (char *)shared, (size_t)bytes));
}

/* protect_pages(address, bytes): whether they are read-only now */
PyObject *module_protect_pages(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_ssize_t at, bytes;
    if (!PyArg_ParseTuple(arguments, "nn", &at, &bytes)) return NULL;
    return PyBool_FromLong(un_protect_pages((char *)at, (size_t)bytes));
}

static PyMethodDef block_methods[] = {
    {"use", block_use, METH_O, NULL},
    {"part", block_part, METH_O, NULL},
    {0},
};

static PyGetSetDef block_properties[] = {{"address", block_address, NULL, NULL, NULL}, {0}};

static PyMemberDef block_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Block, weak_references), READONLY, NULL},
    {0},
};

int prepare_blocks(void) {
    static PyType_Slot slots[] = {
        {Py_tp_doc, "Memory that all ranks of a group map."},
        {Py_tp_dealloc, (void *)free_block},
        {Py_tp_methods, block_methods},
        {Py_tp_getset, block_properties},
        {Py_tp_members, block_members},
        {Py_bf_getbuffer, (void *)get_buffer},
        {0, NULL},
    };
    static PyType_Spec spec = {
        .name = "unisono._native.Block",
        .basicsize = sizeof(Block),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = slots,
    };
    if (!block_type) block_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return block_type ? 0 : -1;
}
