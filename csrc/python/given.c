/* Blocking calls as torch.distributed describes them: tensors, and an object of torch's with options.
 *
 * To ask such an object for asyncOp and reduceOp takes longer than all the rest of a small call, since
 * torch makes an object for every answer. So the values are read where torch keeps them. Where that
 * is, torch itself tells: it fills in samples, and the only place at which each of them has its own
 * value is the field. If there is none, or more than one, the calls go the long way and ask. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "binding.h"

typedef enum field { ASYNC_OP, REDUCTION, ROOT, TIMEOUT_MS, FIELDS } field;

enum { ABSENT = -1, LOOKED_AT = 256, FEWEST_SAMPLES = 16, OPERATIONS = UN_ALLOCATE + 1 };

static const size_t width_of[FIELDS] = {1, 1, sizeof(int64_t), sizeof(int64_t)};

typedef struct layout_of_options {
    PyTypeObject *type; /* NULL: not known */
    int offset[FIELDS]; /* ABSENT: such options have no such field */
} layout_of_options;

static layout_of_options layouts[OPERATIONS];
static PyObject *is_profiling; /* a function of torch's */

/* -- learning -------------------------------------------------------------------------------- */

typedef struct sample {
    char bytes[LOOKED_AT];
    size_t count;
    int64_t value[FIELDS];
    bool has[FIELDS];
} sample;

/* Where an object of torch's keeps what it wraps: the first word behind the header. */
static const char *content_of(PyObject *options) {
    const char *content;
    memcpy(&content, (const char *)options + sizeof(PyObject), sizeof content);
    return content;
}

/* Copy what can be read, through a pipe: the kernel looks whether there is memory at all. */
static size_t copy_readable(char *to, const char *from, const int ends[2]) {
    ssize_t written = write(ends[1], from, LOOKED_AT);
    ssize_t copied = written > 0 ? read(ends[0], to, (size_t)written) : 0;
    return copied > 0 ? (size_t)copied : 0;
}

/* (options, (value or None, ...)), the values in the order of the fields */
static bool read_sample(sample *s, PyTypeObject *type, PyObject *given, const int ends[2]) {
    PyObject *options, *values;
    if (!PyArg_ParseTuple(given, "OO!", &options, &PyTuple_Type, &values)) return false;
    if (Py_TYPE(options) != type || PyTuple_Size(values) != FIELDS) {
        PyErr_SetString(PyExc_TypeError, "a sample has options of one type and a value per field");
        return false;
    }
    for (Py_ssize_t f = 0; f < FIELDS; f++) {
        PyObject *value = PyTuple_GetItem(values, f);
        s->has[f] = value != Py_None;
        s->value[f] = s->has[f] ? PyLong_AsLongLong(value) : 0;
    }
    s->count = copy_readable(s->bytes, content_of(options), ends);
    return !PyErr_Occurred();
}

static int64_t read_field(const char *content, field f, int offset) {
    unsigned char byte;
    int64_t word;
    memcpy(width_of[f] == 1 ? (void *)&byte : (void *)&word, content + offset, width_of[f]);
    return width_of[f] == 1 ? byte : word;
}

/* The only offset at which every sample has its value, or ABSENT. */
static int find_field(const sample *samples, size_t count, field f) {
    int found = ABSENT;
    for (int offset = 0; offset < LOOKED_AT; offset += (int)width_of[f]) {
        bool fits = true;
        for (size_t i = 0; fits && i < count; i++)
            fits = (size_t)offset + width_of[f] <= samples[i].count &&
                   read_field(samples[i].bytes, f, offset) == samples[i].value[f];
        if (!fits) continue;
        if (found != ABSENT) return ABSENT;
        found = offset;
    }
    return found;
}

static bool is_large_enough(PyTypeObject *type) {
    PyObject *size = PyObject_GetAttrString((PyObject *)type, "__basicsize__");
    long bytes = size ? PyLong_AsLong(size) : 0;
    Py_XDECREF(size);
    PyErr_Clear();
    return (size_t)bytes >= sizeof(PyObject) + sizeof(char *);
}

static bool find_fields(layout_of_options *layout, const sample *samples, size_t count) {
    for (field f = 0; f < FIELDS; f++) {
        layout->offset[f] = samples->has[f] ? find_field(samples, count, f) : ABSENT;
        if (samples->has[f] && layout->offset[f] == ABSENT) return false;
    }
    return layout->offset[ASYNC_OP] != ABSENT;
}

/* learn_options(operation, type, samples, is_profiling): whether run_given now knows such options */
PyObject *module_learn_options(PyObject *module, PyObject *arguments) {
    (void)module;
    int operation, ends[2];
    PyTypeObject *type;
    PyObject *given, *profiling;
    if (!PyArg_ParseTuple(arguments, "iO!O!O", &operation, &PyType_Type, &type, &PyList_Type, &given,
                          &profiling))
        return NULL;
    size_t count = (size_t)PyList_Size(given);
    if (operation < 0 || operation >= OPERATIONS || count < FEWEST_SAMPLES)
        return PyErr_Format(PyExc_ValueError, "no such operation, or too few samples");
    if (!is_large_enough(type)) Py_RETURN_FALSE;
    sample *samples = PyMem_Calloc(count, sizeof *samples);
    if (!samples) return PyErr_NoMemory();
    layout_of_options layout = {0};
    bool known = !pipe2(ends, O_CLOEXEC | O_NONBLOCK);
    if (known) {
        for (size_t i = 0; known && i < count; i++)
            known = read_sample(&samples[i], type, PyList_GetItem(given, (Py_ssize_t)i), ends);
        close(ends[0]);
        close(ends[1]);
    }
    known = known && find_fields(&layout, samples, count);
    PyMem_Free(samples);
    if (PyErr_Occurred()) return NULL;
    if (known && !layouts[operation].type) { /* a type is never let go of: calls compare with it */
        Py_INCREF((PyObject *)type);
        layout.type = type;
        layouts[operation] = layout;
        if (!is_profiling) is_profiling = Py_NewRef(profiling);
    }
    return PyBool_FromLong(known);
}

/* -- calls ----------------------------------------------------------------------------------- */

static int64_t given_value(const layout_of_options *layout, const char *content, field f) {
    int offset = layout->offset[f];
    return offset == ABSENT ? 0 : read_field(content, f, offset);
}

static bool is_profiled(void) {
    PyObject *answer = PyObject_CallNoArgs(is_profiling);
    bool no = answer == Py_False;
    Py_XDECREF(answer);
    PyErr_Clear();
    return !no;
}

/* What the options ask for; false where that is not for this way. torch's numbers of the plain
 * reductions are ours, but its average of integers is another. */
static bool read_options(un_call *call, const Group *self, PyObject *options) {
    const layout_of_options *layout = &layouts[call->operation];
    if (Py_TYPE(options) != layout->type || is_profiled()) return false;
    const char *content = content_of(options);
    int64_t reduction = given_value(layout, content, REDUCTION);
    int64_t root = given_value(layout, content, ROOT);
    if (given_value(layout, content, ASYNC_OP) || reduction < 0 || reduction >= UN_PREMUL_SUM ||
        reduction == UN_AVG || root < 0 || root >= self->ranks)
        return false;
    call->reduction = (un_reduction)reduction;
    call->root = (int)root;
    return call->operation != UN_BARRIER || given_value(layout, content, TIMEOUT_MS) <= 0;
}

static bool is_list(PyObject *object) { return PyList_Check(object) || PyTuple_Check(object); }

/* Whether all_to_all can cut a tensor between its rows. */
static bool has_even_rows(PyObject *tensor, int ranks) {
    const dl_exchange_api *api = exchange_api_of(tensor);
    dl_tensor d;
    bool is_even = api && !api->tensor_from_object(tensor, &d) && d.dims && !(d.shape[0] % ranks);
    PyErr_Clear();
    return is_even;
}

static PyObject *only_item(PyObject *object) { /* borrowed; NULL: it is not a list of one */
    return PyList_Check(object) && PyList_Size(object) == 1 ? PyList_GetItem(object, 0) : NULL;
}

/* The tensors as the engine's calls have them; false where they are not for this way. torch passes
 * one in place as [tensor]; and where the wide side is a list, [list] and [tensor]. */
static bool read_given(call_arguments *a, const Group *self, PyObject *output, PyObject *input) {
    un_operation o = a->call.operation;
    if (o == UN_ALL_REDUCE || o == UN_REDUCE || o == UN_BROADCAST) {
        a->output = a->input = only_item(output);
        return a->input && !is_list(a->input);
    }
    a->output = output;
    a->input = input;
    if (o == UN_ALL_TO_ALL)
        return has_even_rows(output, self->ranks) && has_even_rows(input, self->ranks);
    if (!is_list(output) && !is_list(input)) return true;
    a->output = only_item(output);
    a->input = only_item(input);
    return a->output && a->input && is_list(a->output) == (o == UN_ALL_GATHER) &&
           is_list(a->input) == (o == UN_REDUCE_SCATTER);
}

/* run_given(operation, output, input, options): a status */
PyObject *group_run_given(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Group *self = (Group *)object;
    long operation = count == 4 ? PyLong_AsLong(arguments[0]) : -1;
    if (operation < 0 || operation >= OPERATIONS)
        return PyErr_Format(PyExc_TypeError, "run_given takes an operation and 3 arguments");
    call_arguments a;
    a.call = (un_call){.operation = (un_operation)operation, .factor = 1};
    a.coalesced = false;
    a.is_short = true;
    if (!read_options(&a.call, self, arguments[3])) return PyLong_FromLong(ASK_AGAIN);
    if (operation == UN_BARRIER) return group_barrier(object, NULL);
    if (!read_given(&a, self, arguments[1], arguments[2])) return PyLong_FromLong(ASK_AGAIN);
    Py_INCREF(a.output); /* other threads may change the lists while this one waits */
    Py_INCREF(a.input);
    PyObject *status = run_call(&a, self);
    Py_DECREF(a.output);
    Py_DECREF(a.input);
    return status;
}
