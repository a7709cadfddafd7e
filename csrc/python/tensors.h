/* From Python's tensors and arrays to the engine's streams. */
#ifndef UNISONO_TENSORS_H
#define UNISONO_TENSORS_H

#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "dlpack.h"
#include "layouts.h"
#include "unisono.h"

#define COLD __attribute__((cold)) /* kept out of the hot path */

/* The result of reading an argument; -1: an exception is set. Python finds out and reports why
 * an argument is refused (unisono.comm.arguments). */
enum {
    LAZY = 1, /* of check_with_torch alone: the memory does not hold the values themselves */
    REFUSED = 2,
    IN_A_GPU = 3, /* the memory of a tensor */
};

int refuse(void); /* REFUSED, after clearing any exception */

typedef struct tensor {
    char *data;
    un_dtype dtype;
    size_t item_bytes;
    size_t bytes;
    un_layout *layout; /* NULL: contiguous */
    un_shape shape;    /* of messages, and where shapes are compared */
    Py_buffer buffer;  /* held while buffer.obj is set */
    PyObject *capsule; /* the same, for other DLPack producers */
    PyObject *owner;   /* the tensor itself, or a resolved copy, */
    PyObject *lazy;    /* which is written back to this one when the call is over */
} tensor;

void start_tensor(tensor *t); /* before anything else; nothing of it needs to be zero */
void free_tensor(tensor *t);
int read_one(tensor *t, un_view *view, PyObject *object, bool writable); /* as read_side */

/* torch_tensors.c: what DLPack does not say about a tensor with elements of type `code`: 0,
 * LAZY, or REFUSED if its storage shrank. */
int check_with_torch(PyObject *object, const tensor *t, unsigned code);
PyObject *resolve(PyObject *lazy); /* a copy with the values resolved */
void write_resolved(PyObject *lazy, PyObject *resolved);

const dl_exchange_api *exchange_api_of(PyObject *object); /* NULL: its type has none */

/* One side of a call: its tensors, and the streams made of them. */
typedef struct side {
    size_t tensors;
    tensor *tensor;
    un_view *views;
    un_stream *streams;
    tensor few_tensors[4];
    un_view few_views[16];
    un_stream few_streams[16];
} side;

void start_side(side *s); /* before anything else; nothing of it needs to be zero */

/* Read `object`: a tensor or a list or tuple of them, into `parts` streams. One part: all
 * tensors follow each other in it. Several, with a sequence that is not `coalesced`: one tensor
 * per part. Otherwise every tensor is cut evenly into the parts. Returns 0, or as above; call
 * free_side in either case. */
int read_side(side *s, PyObject *object, size_t parts, bool coalesced, bool writable);
bool have_one_dtype(const side *s);
int read_list(side *s, PyObject *sequence); /* only the tensors, of any types, to inspect */
void free_side(side *s);

/* copy_row(row, list, packs): copy a list of tensors into a row of bytes, or back. Each begins at
 * the next multiple of ROW_ALIGNMENT bytes. Raises ValueError, before anything is copied, if one is
 * not contiguous in the CPU's memory, or they have another size than the row. */
PyObject *module_copy_row(PyObject *module, PyObject *arguments);

/* Whether shapes are compared: compare_shapes(bool) of the module. */
extern bool shapes_are_compared;
PyObject *module_compare_shapes(PyObject *module, PyObject *wanted);

/* A hash of the shapes of a side's tensors, never 0. Dimensions of length 1 do not count. */
uint32_t mark_of_shapes(const side *s);

#endif
