/* Blocking calls as torch.distributed describes them: tensors, and torch's options object.
 *
 * Options are read by attribute, and only those that a call needs. torch makes a new object for
 * each access to a reduction; it is identified by its hash, which Python looked up by name. */
#include "binding.h"

static PyObject *async_op, *reduce_op, *root_rank; /* the names of options */
static PyObject *is_profiling;                     /* torch's function */
static Py_hash_t torch_hashes[UN_PREMUL_SUM + 1];  /* by un_reduction; -1 (never a hash): unknown */

/* know_torch(is_profiling, hashes): the hashes of torch's reductions, in our order */
PyObject *module_know_torch(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *profiling, *hashes;
    if (!PyArg_ParseTuple(arguments, "OO!", &profiling, &PyTuple_Type, &hashes)) return NULL;
    if (PyTuple_Size(hashes) != UN_PREMUL_SUM + 1)
        return PyErr_Format(PyExc_ValueError, "know_torch needs one hash for each reduction");
    for (int i = 0; i <= UN_PREMUL_SUM; i++)
        torch_hashes[i] = PyLong_AsSsize_t(PyTuple_GetItem(hashes, i));
    if (PyErr_Occurred()) return NULL;
    Py_XDECREF(is_profiling);
    is_profiling = Py_NewRef(profiling);
    Py_RETURN_NONE;
}

int prepare_given(void) {
    for (int i = 0; i <= UN_PREMUL_SUM; i++) torch_hashes[i] = -1;
    async_op = PyUnicode_InternFromString("asyncOp");
    reduce_op = PyUnicode_InternFromString("reduceOp");
    root_rank = PyUnicode_InternFromString("rootRank");
    return async_op && reduce_op && root_rank ? 0 : -1;
}

/* The reduction in the options, or -1: unknown. */
int given_reduction(PyObject *options) {
    PyObject *reduction = PyObject_GetAttr(options, reduce_op);
    Py_hash_t hash = reduction ? PyObject_Hash(reduction) : -1;
    Py_XDECREF(reduction);
    PyErr_Clear();
    for (int i = 0; hash != -1 && i <= UN_PREMUL_SUM; i++)
        if (torch_hashes[i] == hash) return i;
    return -1;
}

/* The root in the options, or -1. */
int given_root(PyObject *options) {
    PyObject *root = PyObject_GetAttr(options, root_rank);
    long number = root ? PyLong_AsLong(root) : -1;
    Py_XDECREF(root);
    PyErr_Clear();
    return number >= 0 && number < UN_MAX_RANKS ? (int)number : -1;
}

static bool is_false(PyObject *answer) { /* and drops the reference */
    Py_XDECREF(answer);
    PyErr_Clear();
    return answer == Py_False;
}

/* Read the options; false: the fast path does not apply. torch averages integers unlike us. */
static bool read_options(un_call *call, const Group *self, PyObject *options) {
    if (!is_profiling || !is_false(PyObject_CallNoArgs(is_profiling)) ||
        !is_false(PyObject_GetAttr(options, async_op)))
        return false;
    int reduction = un_reduces(call->operation) ? given_reduction(options) : UN_SUM;
    call->root = un_is_rooted(call->operation) ? given_root(options) : 0;
    if (reduction < 0 || reduction == UN_AVG || reduction == UN_PREMUL_SUM) return false;
    call->reduction = (un_reduction)reduction;
    if (un_reduces(call->operation)) call->form = default_form(self);
    return call->root >= 0 && call->root < self->ranks;
}

/* Whether all_to_all can cut a tensor between its rows. */
static bool has_even_rows(PyObject *tensor, int ranks) {
    dl_tensor d;
    return look_at(tensor, &d) && d.dims && !(d.shape[0] % ranks);
}

static PyObject *only_item(PyObject *object) { /* borrowed; NULL: not a list of one */
    return PyList_Check(object) && PyList_Size(object) == 1 ? PyList_GetItem(object, 0) : NULL;
}

/* The tensors as the engine's calls take them; false if the fast path does not apply. torch
 * passes one in place as [tensor]; and where the wide side is a list, [list] and [tensor]. */
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
    if (operation < UN_ALL_REDUCE || operation > UN_ALL_TO_ALL)
        return PyErr_Format(PyExc_TypeError, "run_given takes an operation and 3 arguments");
    call_arguments a;
    a.call = (un_call){.operation = (un_operation)operation, .factor = 1};
    a.coalesced = false;
    a.residual = Py_None;
    if (!read_options(&a.call, self, arguments[3]) ||
        !read_given(&a, self, arguments[1], arguments[2]))
        return PyLong_FromLong(ASK_AGAIN);
    Py_INCREF(a.output); /* other threads may change the lists while this one waits */
    Py_INCREF(a.input);
    PyObject *status = run_call(&a, self);
    Py_DECREF(a.output);
    Py_DECREF(a.input);
    return status;
}
