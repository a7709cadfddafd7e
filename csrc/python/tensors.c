/* From Python's tensors and arrays to the engine's streams. */
#include "tensors.h"

#include <stdlib.h>
#include <string.h>

/* -- one tensor ------------------------------------------------------------------------------ */

COLD int refuse(void) {
    PyErr_Clear();
    return REFUSED;
}

bool shapes_are_compared;
static bool shapes_are_kept; /* only then, and for messages: it would slow down a call of 8 bytes */

PyObject *module_compare_shapes(PyObject *module, PyObject *wanted) {
    (void)module;
    shapes_are_kept = shapes_are_compared = PyObject_IsTrue(wanted) > 0;
    Py_RETURN_NONE;
}

COLD static void note_shape(un_shape *to, int dims, const int64_t *shape) {
    to->dims = dims;
    for (int d = 0; d < dims && d < UN_SHAPE_DIMS; d++) to->length[d] = shape[d];
}

uint32_t mark_of_shapes(const side *s) {
    uint64_t mark = s->tensors;
    for (size_t i = 0; i < s->tensors; i++) {
        const un_shape *shape = &s->tensor[i].shape;
        for (int d = 0; d < shape->dims && d < UN_SHAPE_DIMS; d++)
            if (shape->length[d] != 1)
                mark = (mark ^ (uint64_t)shape->length[d]) * 0x9e3779b97f4a7c15u;
        mark = (mark ^ mark >> 32) * 0x9e3779b97f4a7c15u; /* where one ends and the next begins */
    }
    return (uint32_t)(mark >> 32) | 1;
}

/* Keep the dimensions that matter: drop ones, and merge neighbours that are contiguous. */
static int set_layout(tensor *t, int dims, const int64_t *shape, const int64_t *strides,
                      int64_t stride_unit, bool writable) {
    size_t count = 1;
    for (int d = 0; d < dims; d++) count *= (size_t)shape[d];
    t->bytes = count * t->item_bytes;
    if (shapes_are_kept) note_shape(&t->shape, dims, shape);
    if (!strides || !count) return 0;

    struct un_dim kept[64];
    int n = 0;
    if (dims > 64) return REFUSED;
    for (int d = 0; d < dims; d++) {
        if (shape[d] == 1) continue;
        struct un_dim dim = {(size_t)shape[d], (ptrdiff_t)(strides[d] * stride_unit)};
        if (n && kept[n - 1].stride_bytes == (ptrdiff_t)dim.length * dim.stride_bytes) {
            kept[n - 1].length *= dim.length;
            kept[n - 1].stride_bytes = dim.stride_bytes;
        } else {
            kept[n++] = dim;
        }
    }
    if (!n || (n == 1 && kept[0].stride_bytes == (ptrdiff_t)t->item_bytes)) return 0;
    t->layout = malloc(sizeof *t->layout + (size_t)n * sizeof *kept);
    if (!t->layout) {
        PyErr_NoMemory();
        return -1;
    }
    t->layout->dims = n;
    t->layout->item_bytes = t->item_bytes;
    memcpy(t->layout->dim, kept, (size_t)n * sizeof *kept);
    return writable && overlaps_itself(t->data, t->layout) ? REFUSED : 0;
}

static int from_dlpack(tensor *t, PyObject *object, const dl_tensor *d, bool writable) {
    if (d->device.type != DLPACK_CPU) return d->device.type == DLPACK_CUDA ? IN_A_GPU : REFUSED;
    t->dtype = un_dtype_of(d->dtype.code, d->dtype.bits, d->dtype.lanes);
    t->item_bytes = ((size_t)d->dtype.bits * d->dtype.lanes + 7) / 8;
    t->data = (char *)d->data + d->byte_offset;
    int failed = set_layout(t, d->dims, d->shape, d->strides, (int64_t)t->item_bytes, writable);
    if (failed || !t->bytes) return failed;
    return d->data ? check_with_torch(object, t, d->dtype.code) : REFUSED;
}

/* A type seen before; a program uses a few (Tensor, Parameter, ndarray). */
typedef struct known_type {
    PyObject *type;
    const dl_exchange_api *api; /* NULL: it has none */
    bool masks;                 /* some of its elements, as NumPy's masked arrays do */
} known_type;

static const known_type *know_type(PyObject *object) {
    static known_type known_types[8];
    static unsigned next_known;
    PyObject *type = (PyObject *)Py_TYPE(object);
    for (size_t i = 0; i < sizeof known_types / sizeof *known_types; i++)
        if (known_types[i].type == type) return &known_types[i];
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const dl_exchange_api *api = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
                                         : NULL;
    Py_XDECREF(capsule);
    PyErr_Clear();
    if (api && api->version.major != 1) api = NULL;
    unsigned slot = next_known++ % (sizeof known_types / sizeof *known_types);
    bool masks = !api && PyObject_HasAttrString(type, "mask");
    PyObject *old = known_types[slot].type;
    known_types[slot] = (known_type){Py_NewRef(type), api, masks};
    Py_XDECREF(old);
    return &known_types[slot];
}

const dl_exchange_api *exchange_api_of(PyObject *object) { return know_type(object)->api; }

/* The element type of a buffer's format, in native byte order. */
static bool dtype_of_format(const char *format, size_t item_bytes, un_dtype *dtype) {
    if (!format) format = "B";
    if (*format == '@' || *format == '=' || *format == '<') format++;
    bool complex = *format == 'Z';
    if (complex) format++;
    unsigned code;
    if (!*format || format[1]) return false;
    if (complex)
        code = UN_COMPLEX;
    else if (strchr("bhilqn", *format))
        code = UN_INT;
    else if (strchr("cBHILQN", *format))
        code = UN_UINT;
    else if (strchr("efdg", *format))
        code = UN_FLOAT;
    else if (*format == '?')
        code = UN_BOOL;
    else
        return false;
    *dtype = un_dtype_of(code, (unsigned)(item_bytes * 8) & 0xff, 1);
    return true;
}

static int from_buffer(tensor *t, PyObject *object, bool writable) {
    int flags = PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, &t->buffer, flags)) {
        t->buffer.obj = NULL;
        return refuse();
    }
    t->item_bytes = (size_t)t->buffer.itemsize;
    t->data = t->buffer.buf;
    bool power_of_two = t->item_bytes && t->item_bytes <= 16 &&
                        !(t->item_bytes & (t->item_bytes - 1));
    if (!power_of_two || !dtype_of_format(t->buffer.format, t->item_bytes, &t->dtype))
        return REFUSED;
    return set_layout(t, t->buffer.ndim, t->buffer.shape, t->buffer.strides, 1, writable);
}

/* A lazy tensor as a resolved copy, which is written back when the call is over. */
COLD static int read_resolved(tensor *t, PyObject *object, bool writable) {
    PyObject *resolved = resolve(object), *before = t->owner;
    if (!resolved) return -1;
    if (writable) t->lazy = Py_NewRef(object);
    t->owner = resolved;
    Py_XDECREF(before);
    free(t->layout);
    t->layout = NULL;
    dl_tensor d;
    if (exchange_api_of(resolved)->tensor_from_object(resolved, &d)) return refuse();
    return from_dlpack(t, resolved, &d, writable);
}

static int read_tensor(tensor *t, PyObject *object, bool writable) {
    const known_type *type = know_type(object);
    if (type->api) {
        dl_tensor d;
        if (type->api->tensor_from_object(object, &d)) return refuse(); /* sparse, meta, ... */
        int found = from_dlpack(t, object, &d, writable);
        return found == LAZY ? read_resolved(t, object, writable) : found;
    }
    if (type->masks) return REFUSED;
    if (PyObject_CheckBuffer(object)) return from_buffer(t, object, writable);
    if (PyObject_HasAttrString(object, "__dlpack__")) {
        t->capsule = PyObject_CallMethod(object, "__dlpack__", NULL);
        const dl_managed_tensor *d = t->capsule ? PyCapsule_GetPointer(t->capsule, "dltensor")
                                                : NULL;
        return d ? from_dlpack(t, object, &d->tensor, writable) : refuse();
    }
    return REFUSED;
}

static un_view view_of(const tensor *t, size_t first_byte, size_t bytes, size_t start) {
    un_view view = {.data = t->data, .layout = t->layout, .bytes = bytes, .start = start};
    if (t->layout)
        view.first_byte = first_byte;
    else
        view.data += first_byte;
    return view;
}

void start_tensor(tensor *t) {
    t->layout = NULL;
    t->capsule = NULL;
    t->owner = NULL;
    t->lazy = NULL;
    t->buffer.obj = NULL;
}

void free_tensor(tensor *t) {
    if (t->lazy) write_resolved(t->lazy, t->owner);
    free(t->layout);
    if (t->buffer.obj) PyBuffer_Release(&t->buffer);
    Py_XDECREF(t->capsule);
    Py_XDECREF(t->owner);
    Py_XDECREF(t->lazy);
}

int read_one(tensor *t, un_view *view, PyObject *object, bool writable) {
    shapes_are_kept = true;
    int failed = read_tensor(t, object, writable);
    shapes_are_kept = shapes_are_compared;
    if (failed) return failed;
    *view = view_of(t, 0, t->bytes, 0);
    return 0;
}

/* -- one side of a call ---------------------------------------------------------------------- */

void start_side(side *s) {
    s->tensors = 0;
    s->tensor = s->few_tensors;
    s->views = s->few_views;
    s->streams = s->few_streams;
}

static int allocate_side(side *s, size_t tensors, size_t parts, size_t views) {
    s->tensors = tensors;
    if (tensors > sizeof s->few_tensors / sizeof *s->few_tensors)
        s->tensor = malloc(tensors * sizeof *s->tensor);
    if (views > sizeof s->few_views / sizeof *s->few_views)
        s->views = malloc(views * sizeof *s->views);
    if (parts > sizeof s->few_streams / sizeof *s->few_streams)
        s->streams = malloc(parts * sizeof *s->streams);
    if (s->tensor)
        for (size_t i = 0; i < tensors; i++) start_tensor(&s->tensor[i]);
    if (s->tensor && s->views && s->streams) return 0;
    PyErr_NoMemory();
    return -1;
}

void free_side(side *s) {
    for (size_t i = 0; s->tensor && i < s->tensors; i++) free_tensor(&s->tensor[i]);
    if (s->tensor != s->few_tensors) free(s->tensor);
    if (s->views != s->few_views) free(s->views);
    if (s->streams != s->few_streams) free(s->streams);
}

/* Each tensor is cut into equal parts, one for each stream. */
static int cut_tensors(side *s, size_t parts) {
    for (size_t i = 0; i < s->tensors; i++) {
        if (parts == 1) break;
        size_t items = s->tensor[i].bytes / s->tensor[i].item_bytes;
        if (items % parts) return REFUSED;
    }
    for (size_t part = 0; part < parts; part++) {
        un_stream *stream = &s->streams[part];
        *stream = (un_stream){.views = &s->views[part * s->tensors], .count = s->tensors};
        for (size_t i = 0; i < s->tensors; i++) {
            size_t bytes = parts == 1 ? s->tensor[i].bytes : s->tensor[i].bytes / parts;
            s->views[part * s->tensors + i] = view_of(&s->tensor[i], part * bytes, bytes,
                                                      stream->bytes);
            stream->bytes += bytes;
        }
    }
    return 0;
}

static int one_tensor_per_part(side *s, size_t parts) {
    if (s->tensors != parts) return REFUSED;
    for (size_t part = 0; part < parts; part++) {
        size_t bytes = s->tensor[part].bytes;
        s->views[part] = view_of(&s->tensor[part], 0, bytes, 0);
        s->streams[part] = (un_stream){.views = &s->views[part], .count = 1, .bytes = bytes};
    }
    return 0;
}

/* The tensors of a sequence into a side that has room for them. */
static int read_items(side *s, PyObject *sequence, bool writable) {
    for (size_t i = 0; i < s->tensors; i++) {
        PyObject *item = PySequence_GetItem(sequence, (Py_ssize_t)i);
        if (!item) return -1;
        s->tensor[i].owner = item;
        int failed = read_tensor(&s->tensor[i], item, writable);
        if (failed) return failed;
    }
    return 0;
}

int read_list(side *s, PyObject *sequence) {
    Py_ssize_t tensors = PySequence_Size(sequence);
    if (tensors < 0 || allocate_side(s, (size_t)tensors, 1, 1)) return -1;
    return read_items(s, sequence, false);
}

bool have_one_dtype(const side *s) {
    for (size_t i = 1; i < s->tensors; i++)
        if (s->tensor[i].dtype != s->tensor[0].dtype) return false;
    return true;
}

int read_side(side *s, PyObject *object, size_t parts, bool coalesced, bool writable) {
    bool many = PyList_Check(object) || PyTuple_Check(object);
    Py_ssize_t tensors = many ? PySequence_Size(object) : 1;
    size_t views = coalesced || !many ? (size_t)tensors * parts : (size_t)tensors;
    if (allocate_side(s, (size_t)tensors, parts, views)) return -1;
    int failed = many ? read_items(s, object, writable) : read_tensor(s->tensor, object, writable);
    if (failed) return failed;
    return coalesced || !many ? cut_tensors(s, parts) : one_tensor_per_part(s, parts);
}

/* -- rows -------------------------------------------------------------------------------------- */

enum { ROW_ALIGNMENT = 16 };

static size_t aligned(size_t bytes) {
    return (bytes + ROW_ALIGNMENT - 1) / ROW_ALIGNMENT * ROW_ALIGNMENT;
}

static bool fit_into(const side *s, PyObject *list, const tensor *row) {
    size_t end = 0;
    for (size_t i = 0; i < s->tensors; i++) {
        const tensor *t = &s->tensor[i];
        if (t->layout || t->owner != PyList_GetItem(list, (Py_ssize_t)i)) return false;
        end += aligned(t->bytes);
    }
    return !row->layout && end == row->bytes;
}

PyObject *module_copy_row(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *object, *list;
    int packs;
    if (!PyArg_ParseTuple(arguments, "OO!p", &object, &PyList_Type, &list, &packs)) return NULL;
    tensor row;
    side s;
    start_tensor(&row);
    start_side(&s);
    bool is_read = !read_tensor(&row, object, true) && !read_list(&s, list);
    bool fit = is_read && fit_into(&s, list, &row);
    for (size_t i = 0, begin = 0; fit && i < s.tensors; begin += aligned(s.tensor[i++].bytes)) {
        char *from = packs ? s.tensor[i].data : row.data + begin;
        memcpy(packs ? row.data + begin : s.tensor[i].data, from, s.tensor[i].bytes);
    }
    free_side(&s);
    free_tensor(&row);
    if (fit) Py_RETURN_NONE;
    if (PyErr_Occurred()) return NULL;
    return PyErr_Format(PyExc_ValueError, "the tensors are not contiguous, or do not fit");
}
