/* Blocking calls: read the arguments, enter the engine, and release the GIL when it waits. */
#include "binding.h"

/* Small calls that need not wait are over before another thread could use the GIL: it is
 * released only when the engine blocks, and the thread state is parked here meanwhile. */
void release_gil(void *parked) {
    PyThreadState **state = parked;
    if (!*state) *state = PyEval_SaveThread();
}

/* Check for Ctrl-C while the engine waits. */
int handle_signals(void *parked) {
    PyThreadState **state = parked;
    PyEval_RestoreThread(*state);
    int failed = PyErr_CheckSignals();
    *state = PyEval_SaveThread();
    return failed;
}

/* A call failed, and its caller is still on the stack: tell the peers' error texts where. */
void write_site_note(un_group *group, uint64_t about) {
    const un_site *site = current_site();
    if (site) un_group_write_note(group, UN_SITE, about, site->text);
}

/* Enter the engine. The result is a status, or -1 with an exception. */
int enter_engine(Group *self, un_status (*body)(un_group *, const un_call *), un_call *call,
                 bool small) {
    if (!self->group || self->closing) return UN_CLOSED;
    if (self->pending) reap(self);
    self->users++;
    PyThreadState *parked = NULL;
    if (!call->timeout_ns) call->timeout_ns = self->timeout_ns;
    call->block = release_gil;
    call->pause = handle_signals;
    call->argument = &parked;
    if (self->keeps_sites || all_sites_are_kept) call->site = current_site();
    if (!small) release_gil(&parked);
    un_status status = body(self->group, call);
    if (parked) PyEval_RestoreThread(parked);
    if (status) write_site_note(self->group, un_group_calls(self->group));
    if (!--self->users && self->closing) close_now(self);
    return PyErr_Occurred() ? -1 : (int)status; /* Ctrl-C takes precedence over what it led to */
}

/* What to return if an argument was refused: Python finds out why, raises, and tells the peers. */
COLD PyObject *status_of(int read) {
    return read < 0 ? NULL : PyLong_FromLong(read == IN_A_GPU ? ON_DEVICE : ASK_AGAIN);
}

static size_t side_bytes(const side *s) {
    size_t bytes = 0;
    for (size_t i = 0; i < s->tensors; i++) bytes += s->tensor[i].bytes;
    return bytes;
}

/* Whether the tensors of the two sides have the same sizes, one by one; each contribution's do. */
static bool tensors_fit(const call_arguments *a, const Group *self) {
    const side *in = &a->in, *out = &a->out;
    un_operation o = a->call.operation;
    size_t times = a->call.contributions ? a->call.contributions : 1;
    if (in->tensors != times * out->tensors) return false;
    for (size_t i = 0; i < in->tensors; i++) {
        size_t given = in->tensor[i].bytes / (un_is_wide_input(o) ? (size_t)self->ranks : 1);
        size_t taken = out->tensor[i % out->tensors].bytes /
                       (un_is_wide_output(o) ? (size_t)self->ranks : 1);
        if (given != taken) return false;
    }
    return true;
}

static uint64_t hash_of_tensors(const side *s) {
    uint64_t hash = s->tensors;
    for (size_t i = 0; i < s->tensors; i++) {
        hash = (hash ^ s->tensor[i].bytes) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    return hash;
}

/* Both sides of a call must match; the engine checks what other ranks pass. */
static int check_sides(const call_arguments *a, const Group *self) {
    const side *in = &a->in, *out = &a->out;
    un_operation o = a->call.operation;
    if (!in->tensors || !out->tensors) return 0;
    if (in->tensor[0].dtype != out->tensor[0].dtype) return REFUSED;
    size_t given = in->streams[un_is_wide_input(o) ? self->rank : 0].bytes;
    size_t taken = out->streams[un_is_wide_output(o) ? self->rank : 0].bytes;
    if (a->coalesced) return tensors_fit(a, self) ? 0 : REFUSED;
    return given == taken ? 0 : REFUSED;
}

/* In gather and scatter the root, and only the root, passes the wide side. */
static int check_present(const call_arguments *a, const Group *self) {
    un_operation o = a->call.operation;
    bool is_root = a->call.root == self->rank;
    if (!a->in.tensors != (o == UN_SCATTER && !is_root)) return REFUSED;
    if (a->in_place) return 0;
    if (!a->out.tensors != (o == UN_GATHER && !is_root)) return REFUSED;
    return check_sides(a, self);
}

/* Whether no tensors can share memory: one tensor, or one contiguous tensor on each side. */
static bool lie_apart(const side *in, const side *out) {
    if (in->tensors + out->tensors == 1) return true;
    const tensor *a = in->tensor, *b = out->tensor;
    return in->tensors == 1 && out->tensors == 1 && !a->layout && !b->layout &&
           (a->data + a->bytes <= b->data || b->data + b->bytes <= a->data);
}

static int check_memory(const call_arguments *a, const Group *self) {
    extent found[2];
    if (lie_apart(&a->in, &a->out)) return 0;
    return check_overlaps(a, (size_t)self->rank, (size_t)self->ranks, found);
}

/* Only the peer itself may pass its part of a block: it may be doing so in this very call. */
static int check_owners(const side *s, const Group *self) {
    for (size_t i = 0; self->group && i < s->tensors; i++) {
        int owner = s->tensor[i].bytes ? un_group_owner(self->group, s->tensor[i].data, 1) : -1;
        if (owner >= 0 && owner != self->rank) return REFUSED;
    }
    return 0;
}

/* All ranks' tensors must have one shape where all contribute equally. Parts of different sizes,
 * and so of different shapes, show in the bytes of the wide side, which are equal on all ranks. */
static void add_shapes(call_arguments *a, const Group *self) {
    un_operation o = a->call.operation;
    if (o == UN_GATHER || o == UN_SCATTER || o == UN_ALL_TO_ALL) return;
    bool wide_input = un_is_wide_input(o);
    bool gives_more = wide_input || a->call.contributions;
    const side *narrow = gives_more ? &a->out : &a->in, *wide = wide_input ? &a->in : &a->out;
    for (int part = 1; (wide_input || un_is_wide_output(o)) && part < self->ranks; part++)
        if (wide->streams[part].bytes != wide->streams[0].bytes) return;
    if (!narrow->tensors) return;
    a->call.shape = &narrow->tensor->shape;
    a->call.shape_mark = mark_of_shapes(narrow);
}

/* A broadcast does not change the root's tensor, nor a reduce the others': the resolved copy of
 * a lazy tensor need not be written back. */
static void keep_unwritten(call_arguments *a, const Group *self) {
    bool is_root = a->call.root == self->rank;
    if (a->call.operation == UN_BROADCAST ? !is_root : a->call.operation != UN_REDUCE || is_root)
        return;
    for (size_t i = 0; i < a->in.tensors; i++) Py_CLEAR(a->in.tensor[i].lazy);
}

/* Contiguous float32, as many as the call has elements. The caller keeps it alive. */
static int read_residual(call_arguments *a) {
    tensor t;
    un_view view;
    start_tensor(&t);
    int failed = read_one(&t, &view, a->residual, true);
    size_t item = a->out.tensors ? a->out.tensor->item_bytes : a->in.tensor->item_bytes;
    bool fits = !failed && !t.layout && t.dtype == un_dtype_of(UN_FLOAT, 32, 1) &&
                t.bytes / sizeof(float) == a->call.output->bytes / item;
    a->call.residual = fits ? (float *)(void *)t.data : NULL;
    free_tensor(&t);
    return failed ? failed : fits ? 0 : REFUSED;
}

/* Read both sides of a call into streams: 0, or why not; no peer has seen the call yet. */
int read_tensors(call_arguments *a, Group *self) {
    un_call *call = &a->call;
    bool wide_input = un_is_wide_input(call->operation),
         wide_output = un_is_wide_output(call->operation);
    size_t ranks = (size_t)self->ranks;
    a->in_place = a->output == a->input && a->input != Py_None && wide_input == wide_output;
    int failed = 0;
    start_side(&a->in);
    start_side(&a->out);
    if (a->input != Py_None)
        failed = read_side(&a->in, a->input, wide_input ? ranks : 1, a->coalesced || !wide_input,
                           a->in_place);
    if (!failed && !a->in_place && a->output != Py_None)
        failed = read_side(&a->out, a->output, wide_output ? ranks : 1,
                           a->coalesced || !wide_output, true);
    if (failed) return failed;
    if (!have_one_dtype(&a->in) || !have_one_dtype(&a->out)) return REFUSED;
    keep_unwritten(a, self);
    if ((failed = check_present(a, self)) || (failed = check_memory(a, self)) ||
        (failed = check_owners(a->in_place ? &a->in : &a->out, self)))
        return failed;
    call->dtype = (a->in.tensors ? &a->in : &a->out)->tensor->dtype;
    if (un_reduces(call->operation) && !un_reducible(call->dtype, call->reduction)) return REFUSED;
    call->input = a->in.streams;
    call->output = a->in_place ? a->in.streams : a->out.streams;
    if (a->coalesced)
        call->shape_hash = hash_of_tensors(wide_input || call->contributions ? &a->out : &a->in);
    if (shapes_are_compared) add_shapes(a, self);
    return a->residual == Py_None ? 0 : read_residual(a);
}

void free_tensors(call_arguments *a) {
    free_side(&a->in);
    free_side(&a->out);
}

/* A status as a number, or NULL with an exception. */
PyObject *run_call(call_arguments *a, Group *self) {
    int failed = read_tensors(a, self), status = 0;
    if (!failed) {
        bool small = side_bytes(&a->in) + side_bytes(&a->out) <= SMALL_BYTES;
        status = enter_engine(self, un_run, &a->call, small);
    }
    free_tensors(a);
    if (failed) return status_of(failed);
    return status < 0 ? NULL : PyLong_FromLong(status);
}

/* The names of the plain reductions, interned, so that one comparison of pointers finds them. */
static PyObject *reduction_names[UN_PREMUL_SUM];

static const char *const reduction_texts[UN_PREMUL_SUM] = {"sum", "avg",  "product", "min",
                                                           "max", "band", "bor",     "bxor"};

/* A name that is not interned, or an alias. */
COLD static int find_spelling(PyObject *name) {
    if (!PyUnicode_Check(name)) return -1;
    for (int i = 0; i < UN_PREMUL_SUM; i++)
        if (!PyUnicode_CompareWithASCIIString(name, reduction_texts[i])) return i;
    if (!PyUnicode_CompareWithASCIIString(name, "mean")) return UN_AVG;
    return PyUnicode_CompareWithASCIIString(name, "prod") ? -1 : UN_PRODUCT;
}

static int find_reduction(PyObject *name) {
    for (int i = 0; i < UN_PREMUL_SUM; i++)
        if (reduction_names[i] == name) return i;
    return find_spelling(name);
}

/* Whether a list of tensors is coalesced; otherwise a list is a wide side. */
static bool is_coalesced(un_operation o, PyObject *output, PyObject *input) {
    if (o == UN_GATHER || o == UN_SCATTER || o == UN_ALL_TO_ALL) return false;
    return is_list(un_is_wide_input(o) ? output : input);
}

static int read_schedule(call_arguments *a, const Group *self) {
    PyObject *bytes = a->schedule_bytes;
    un_operation o = a->call.operation;
    if (bytes == Py_None) return 0;
    if (!PyBytes_Check(bytes) || (o != UN_ALL_REDUCE && o != UN_BROADCAST) ||
        !un_schedule_read(&a->schedule, (const int64_t *)(const void *)PyBytes_AsString(bytes),
                          (size_t)PyBytes_Size(bytes) / sizeof(int64_t), self->rank, self->ranks))
        return REFUSED;
    a->call.schedule = &a->schedule;
    return 0;
}

/* (operation, output, input, root, reduction), then optionally a factor, a compiled schedule as
 * bytes, a timeout, how many contributions the input has (a list, one after the other), and a residual
 * of the wire format. A reduction is a plain name, or with a factor a number that includes its form. The caller keeps tensors and
 * bytes alive; `a` must not move. 0, REFUSED, or -1 with an exception. */
int parse_call(call_arguments *a, const Group *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count < 5 || count > 10) {
        PyErr_SetString(PyExc_TypeError, "a call takes 5 to 10 arguments");
        return -1;
    }
    un_operation o = (un_operation)PyLong_AsLong(arguments[0]);
    PyObject *root = arguments[3], *reduction = arguments[4];
    a->output = arguments[1];
    a->input = arguments[2];
    a->schedule_bytes = count > 6 ? arguments[6] : Py_None;
    a->residual = count > 9 ? arguments[9] : Py_None;
    a->coalesced = is_coalesced(o, a->output, a->input);
    if (a->coalesced && !(is_list(a->output) && is_list(a->input))) return REFUSED;
    a->call = (un_call){.operation = o, .factor = count > 5 ? PyFloat_AsDouble(arguments[5]) : 1};
    if (count > 7) a->call.timeout_ns = PyLong_AsLongLong(arguments[7]); /* 0: the group's */
    if (un_reduces(o)) { /* a number comes with a factor, and only from our own code */
        bool has_form = count > 5 && PyLong_Check(reduction);
        int number = has_form ? (int)PyLong_AsLong(reduction) : find_reduction(reduction);
        if (number < 0) return REFUSED;
        a->call.reduction = (un_reduction)(number & ((1 << UN_FORM_SHIFT) - 1));
        a->call.form = has_form ? (unsigned)number >> UN_FORM_SHIFT : default_form(self);
        if (a->call.form & UN_CONTRIBUTIONS)
            a->call.contributions = count > 8 ? (uint32_t)PyLong_AsUnsignedLong(arguments[8]) : 0;
        if (a->call.form & UN_CONTRIBUTIONS && !a->call.contributions) return refuse();
    } else if (count > 6 && PyLong_Check(reduction)) { /* which schedule it is, for error texts */
        a->call.reduction = (un_reduction)(PyLong_AsLong(reduction) & 0xff);
    }
    if (!PyLong_CheckExact(root)) return REFUSED;
    long given = PyLong_AsLong(root);
    if (PyErr_Occurred()) return refuse();
    if (un_is_rooted(o) && (given < 0 || given >= self->ranks)) return REFUSED;
    a->call.root = (int)given; /* of an all_reduce by a schedule: the mark of the schedule */
    return read_schedule(a, self);
}

PyObject *group_run(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    call_arguments a;
    int failed = parse_call(&a, (Group *)object, arguments, count);
    return failed ? status_of(failed) : run_call(&a, (Group *)object);
}

/* all_reduce(tensors, op, reproducible, or None for the group's default): the same for the most
 * common call, with nothing to parse */
PyObject *group_all_reduce(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    int reduction = count == 3 ? find_reduction(arguments[1]) : -1;
    PyObject *tree = reduction < 0 ? NULL : arguments[2];
    if (!tree || (tree != Py_None && !PyBool_Check(tree))) return PyLong_FromLong(ASK_AGAIN);
    unsigned form = tree == Py_True ? UN_REPRODUCIBLE : 0;
    if (tree == Py_None) form = default_form((Group *)object);
    call_arguments a;
    a.call = (un_call){.operation = UN_ALL_REDUCE,
                       .reduction = (un_reduction)reduction,
                       .form = form,
                       .factor = 1};
    a.output = a.input = arguments[0];
    a.residual = Py_None;
    a.coalesced = is_list(a.input);
    return run_call(&a, (Group *)object);
}

PyObject *group_barrier(PyObject *object, PyObject *ignored) {
    (void)ignored;
    un_call call = {.operation = UN_BARRIER};
    int status = enter_engine((Group *)object, un_run, &call, true);
    return status < 0 ? NULL : PyLong_FromLong(status);
}

/* refuse(operation): take part in a call that Python has refused on this rank. */
PyObject *group_refuse(PyObject *object, PyObject *operation) {
    un_call call = {.operation = (un_operation)PyLong_AsLong(operation)};
    if (PyErr_Occurred()) return NULL;
    int status = enter_engine((Group *)object, un_refuse, &call, true);
    return status < 0 ? NULL : PyLong_FromLong(status);
}

int prepare_calls(void) {
    for (int i = 0; i < UN_PREMUL_SUM; i++)
        if (!reduction_names[i] &&
            !(reduction_names[i] = PyUnicode_InternFromString(reduction_texts[i])))
            return -1;
    return 0;
}
