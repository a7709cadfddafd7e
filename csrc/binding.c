/* The Python module unisono._native: a thin skin over unisono.h on the limited C API. */
#include "tensors.h"

#include <errno.h>
#include <string.h>

typedef struct Group {
    PyObject_HEAD
    un_group *group; /* NULL once closed */
    int ranks;
    int rank;
    int users; /* calls under way, counted under the GIL */
    bool closing;
    int64_t timeout_ns;
    struct Work *pending; /* works under way, oldest first */
} Group;

static void reap(Group *self);

/* -- calls ----------------------------------------------------------------------------------- */

/* Small calls that need not wait are over before another thread could use the GIL: it is given
 * away only when the engine blocks, and the thread's state is parked here meanwhile. */
static void release_gil(void *parked) {
    PyThreadState **state = parked;
    if (!*state) *state = PyEval_SaveThread();
}

/* Look for Ctrl-C while the engine waits. */
static int handle_signals(void *parked) {
    PyThreadState **state = parked;
    PyEval_RestoreThread(*state);
    int failed = PyErr_CheckSignals();
    *state = PyEval_SaveThread();
    return failed;
}

static void close_now(Group *self) {
    un_group *group = self->group;
    self->group = NULL;
    if (!group) return;
    PyThreadState *parked = PyEval_SaveThread();
    un_group_close(group);
    PyEval_RestoreThread(parked);
    reap(self);
}

/* Enter the engine. The result is a status, or -1 with an exception. */
static int enter(Group *self, un_status (*body)(un_group *, const un_call *), un_call *call,
                 bool small) {
    if (!self->group || self->closing) return UN_CLOSED;
    if (self->pending) reap(self);
    self->users++;
    PyThreadState *parked = NULL;
    call->timeout_ns = self->timeout_ns;
    call->block = release_gil;
    call->pause = handle_signals;
    call->argument = &parked;
    if (!small) release_gil(&parked);
    un_status status = body(self->group, call);
    if (parked) PyEval_RestoreThread(parked);
    if (!--self->users && self->closing) close_now(self);
    return PyErr_Occurred() ? -1 : (int)status; /* Ctrl-C weighs more than what it led to */
}

/* An argument made no sense: tell the peers, then let the exception go on. */
static PyObject *refuse(Group *self, un_call *call) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    call->dtype = 0;
    enter(self, un_refuse, call, true);
    if (PyErr_Occurred()) { /* an interrupt while telling them weighs more */
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
    } else {
        PyErr_Restore(type, value, traceback);
    }
    return NULL;
}

enum { SMALL_BYTES = 8192 };

static size_t side_bytes(const side *s) {
    size_t bytes = 0;
    for (size_t i = 0; i < s->tensors; i++) bytes += s->tensor[i].bytes;
    return bytes;
}

static uint64_t hash_of_tensors(const side *s) {
    uint64_t hash = s->tensors;
    for (size_t i = 0; i < s->tensors; i++) {
        hash = (hash ^ s->tensor[i].bytes) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    return hash;
}

static bool is_wide_input(un_operation o) {
    return o == UN_REDUCE_SCATTER || o == UN_SCATTER || o == UN_ALL_TO_ALL;
}

static bool is_wide_output(un_operation o) {
    return o == UN_ALL_GATHER || o == UN_GATHER || o == UN_ALL_TO_ALL;
}

/* Both sides of a call must fit each other; what other ranks pass is the engine's to check. */
static int check_sides(const Group *self, un_operation o, const side *in, const side *out,
                       bool coalesced) {
    if (!in->tensors || !out->tensors) return 0;
    if (in->tensor[0].dtype != out->tensor[0].dtype) {
        PyErr_SetString(PyExc_TypeError, "input and output have different dtypes");
        return -1;
    }
    size_t given = in->streams[is_wide_input(o) ? self->rank : 0].bytes;
    size_t taken = out->streams[is_wide_output(o) ? self->rank : 0].bytes;
    bool fits = given == taken && (!coalesced || in->tensors == out->tensors);
    for (size_t i = 0; fits && coalesced && i < in->tensors; i++) {
        given = in->tensor[i].bytes / (is_wide_input(o) ? (size_t)self->ranks : 1);
        taken = out->tensor[i].bytes / (is_wide_output(o) ? (size_t)self->ranks : 1);
        fits = given == taken;
    }
    if (fits) return 0;
    size_t item = in->tensor[0].item_bytes;
    PyErr_Format(PyExc_ValueError,
                 "this rank's part has %zu elements in the input and %zu in the output",
                 given / item, taken / item);
    return -1;
}

/* Only a rank that is not the root may have nothing on the wide side of gather and scatter. */
static int check_present(const Group *self, const un_call *call, const side *in, const side *out,
                         bool in_place, bool coalesced) {
    bool root = call->root == self->rank;
    bool in_needed = call->operation != UN_SCATTER || root;
    bool out_needed = !in_place && (call->operation != UN_GATHER || root);
    if ((in_needed && !in->tensors) || (out_needed && !out->tensors)) {
        PyErr_SetString(PyExc_TypeError, "None in place of a tensor");
        return -1;
    }
    return in_place ? 0 : check_sides(self, call->operation, in, out, coalesced);
}

/* Read both sides of a call into streams. On failure the peers know, and an exception is set. */
static int read_arguments(Group *self, un_call *call, PyObject *output, PyObject *input,
                          bool coalesced, side *in, side *out) {
    bool in_place = output == input && input != Py_None &&
                    is_wide_input(call->operation) == is_wide_output(call->operation);
    size_t ranks = (size_t)self->ranks;
    int failed = 0;
    start_side(in);
    start_side(out);
    if (input != Py_None) {
        bool wide = is_wide_input(call->operation);
        failed = read_side(in, input, wide ? ranks : 1, coalesced || !wide, in_place);
    }
    if (!failed && !in_place && output != Py_None) {
        bool wide = is_wide_output(call->operation);
        failed = read_side(out, output, wide ? ranks : 1, coalesced || !wide, true);
    }
    if (!failed) failed = check_present(self, call, in, out, in_place, coalesced);
    if (failed) {
        refuse(self, call);
        return -1;
    }
    const side *narrow = is_wide_input(call->operation) ? out : in;
    call->dtype = (in->tensors ? in : out)->tensor->dtype;
    call->input = in->streams;
    call->output = in_place ? in->streams : out->streams;
    if (coalesced) call->shape_hash = hash_of_tensors(narrow);
    return 0;
}

static PyObject *run(Group *self, un_call *call, PyObject *output, PyObject *input,
                     bool coalesced) {
    side in, out;
    PyObject *result = NULL;
    if (!read_arguments(self, call, output, input, coalesced, &in, &out)) {
        bool small = side_bytes(&in) + side_bytes(&out) <= SMALL_BYTES;
        int status = enter(self, un_run, call, small);
        if (status >= 0) result = PyLong_FromLong(status);
    }
    free_side(&in);
    free_side(&out);
    return result;
}

/* The names of the plain reductions, interned, so that one comparison of pointers finds them. */
static PyObject *reduction_names[UN_PREMUL_SUM];

static int find_reduction(PyObject *name) {
    for (int i = 0; i < UN_PREMUL_SUM; i++)
        if (reduction_names[i] == name) return i;
    return -1;
}

/* all_reduce(tensor, op): the short way in for the commonest call, one tensor and a plain op.
 * Anything else answers ASK_AGAIN and has happened to nobody: the caller takes the long way. */
enum { ASK_AGAIN = 100 };

static PyObject *group_all_reduce(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "all_reduce takes 2 arguments");
    PyObject *tensors = arguments[0];
    int reduction = find_reduction(arguments[1]);
    if (reduction < 0 || PyList_Check(tensors) || PyTuple_Check(tensors))
        return PyLong_FromLong(ASK_AGAIN);
    un_call call = {
        .operation = UN_ALL_REDUCE, .reduction = (un_reduction)reduction, .factor = 1};
    return run((Group *)object, &call, tensors, tensors, false);
}

/* (operation, output, input, root, reduction, factor, coalesced) */
static int read_call(un_call *call, bool *coalesced, PyObject *const *arguments,
                     Py_ssize_t count) {
    if (count != 7) {
        PyErr_SetString(PyExc_TypeError, "a call has 7 arguments");
        return -1;
    }
    *call = (un_call){.operation = (un_operation)PyLong_AsLong(arguments[0]),
                      .root = (int)PyLong_AsLong(arguments[3]),
                      .reduction = (un_reduction)PyLong_AsLong(arguments[4]),
                      .factor = PyFloat_AsDouble(arguments[5])};
    *coalesced = PyObject_IsTrue(arguments[6]) > 0;
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *group_run(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    un_call call;
    bool coalesced;
    if (read_call(&call, &coalesced, arguments, count)) return NULL;
    return run((Group *)object, &call, arguments[1], arguments[2], coalesced);
}

static PyObject *group_barrier(PyObject *object, PyObject *ignored) {
    (void)ignored;
    un_call call = {.operation = UN_BARRIER};
    int status = enter((Group *)object, un_run, &call, true);
    return status < 0 ? NULL : PyLong_FromLong(status);
}

/* refuse(operation): take part in a call that this rank's Python side has refused. */
static PyObject *group_refuse(PyObject *object, PyObject *operation) {
    un_call call = {.operation = (un_operation)PyLong_AsLong(operation)};
    if (PyErr_Occurred()) return NULL;
    int status = enter((Group *)object, un_refuse, &call, true);
    return status < 0 ? NULL : PyLong_FromLong(status);
}

/* -- works ------------------------------------------------------------------------------------- */

/* A submitted call or a message. While it is under way its group holds on to it, and it to its
 * tensors. */
typedef struct Work {
    PyObject_HEAD
    bool is_message;
    un_work work;
    un_message message;
    side in, out;
    Group *group;
    PyObject *tensors;
    struct Work *next; /* in the group's list, in the order of submission */
} Work;

static PyTypeObject *work_type;

static void release_tensors(Work *self) {
    if (!self->tensors) return;
    free_side(&self->in);
    free_side(&self->out);
    Py_CLEAR(self->tensors);
}

static bool is_done(const Work *self) {
    return self->is_message ? un_message_done(&self->message) : un_work_done(&self->work);
}

/* Let go of the works that are done. Called with the GIL, whenever the group is used. */
static void reap(Group *self) {
    for (Work **link = &self->pending; *link;) {
        Work *work = *link;
        if (!is_done(work)) {
            link = &work->next;
            continue;
        }
        *link = work->next;
        release_tensors(work);
        Py_DECREF((PyObject *)work);
    }
}

/* A work that holds `tensors`; a new reference, or NULL with an exception. */
static Work *new_work(PyObject *tensors) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(work_type, Py_tp_alloc);
    Work *work = tensors ? (Work *)allocate(work_type, 0) : NULL;
    if (!work) {
        Py_XDECREF(tensors);
        return NULL;
    }
    start_side(&work->in);
    start_side(&work->out);
    work->tensors = tensors;
    return work;
}

/* The group holds on to the work until it is done. */
static PyObject *keep(Group *self, Work *work) {
    Py_INCREF((PyObject *)self);
    work->group = self;
    Py_INCREF((PyObject *)work);
    Work **link = &self->pending;
    while (*link) link = &(*link)->next;
    *link = work;
    return (PyObject *)work;
}

/* submit(...), with the arguments of run: a Work. */
static PyObject *group_submit(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Group *self = (Group *)object;
    un_call call;
    bool coalesced;
    if (read_call(&call, &coalesced, arguments, count)) return NULL;
    if (!self->group || self->closing) return PyLong_FromLong(UN_CLOSED);
    reap(self);
    Work *work = new_work(PyTuple_Pack(2, arguments[1], arguments[2]));
    if (!work) return NULL;
    int failed = 0;
    if (call.operation != UN_BARRIER)
        failed = read_arguments(self, &call, arguments[1], arguments[2], coalesced, &work->in,
                                &work->out);
    call.timeout_ns = self->timeout_ns;
    work->work.call = call;
    un_status status = failed ? UN_OK : un_submit(self->group, &work->work);
    if (failed || status) {
        Py_DECREF((PyObject *)work);
        return failed ? NULL : PyLong_FromLong(status);
    }
    return keep(self, work);
}

/* message(sends, tensor, peer, tag, blocking): a Work, done already if blocking. */
static PyObject *group_message(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Group *self = (Group *)object;
    if (count != 5) return PyErr_Format(PyExc_TypeError, "message takes 5 arguments");
    if (!self->group || self->closing) return PyLong_FromLong(UN_CLOSED);
    bool sends = PyObject_IsTrue(arguments[0]) > 0, blocking = PyObject_IsTrue(arguments[4]) > 0;
    int peer = (int)PyLong_AsLong(arguments[2]);
    int64_t tag = PyLong_AsLongLong(arguments[3]);
    if (PyErr_Occurred()) return NULL;
    if (self->pending) reap(self);
    Work *work = new_work(PyTuple_Pack(1, arguments[1]));
    if (!work) return NULL;
    if (read_side(&work->in, arguments[1], 1, true, !sends)) {
        Py_DECREF((PyObject *)work);
        return NULL;
    }
    work->is_message = true;
    work->message = (un_message){.sends = sends,
                                 .peer = peer,
                                 .tag = tag,
                                 .dtype = work->in.tensor->dtype,
                                 .stream = work->in.streams[0]};
    PyThreadState *parked = NULL;
    un_call hooks = {.timeout_ns = self->timeout_ns,
                     .block = release_gil,
                     .pause = handle_signals,
                     .argument = &parked};
    self->users++;
    keep(self, work);
    if (blocking)
        un_message_run(self->group, &work->message, &hooks);
    else
        un_message_start(self->group, &work->message);
    if (parked) PyEval_RestoreThread(parked);
    if (!--self->users && self->closing) close_now(self);
    if (self->pending) reap(self);
    if (!PyErr_Occurred()) return (PyObject *)work;
    Py_DECREF((PyObject *)work);
    return NULL;
}

static PyObject *work_is_done(PyObject *object, PyObject *ignored) {
    (void)ignored;
    return PyBool_FromLong(is_done((Work *)object));
}

/* About a message: who sent it, and the bytes and type that it had. */
static PyObject *work_seen(PyObject *object, PyObject *ignored) {
    (void)ignored;
    const un_message *m = &((Work *)object)->message;
    return Py_BuildValue("iKI", m->source, (unsigned long long)m->seen_bytes,
                         (unsigned)m->seen_dtype);
}

/* wait(timeout_ns): a status; a negative timeout waits for as long as it takes. */
static PyObject *work_wait(PyObject *object, PyObject *timeout) {
    Work *self = (Work *)object;
    Group *group = self->group;
    PyThreadState *parked = NULL;
    un_call hooks = {.timeout_ns = PyLong_AsLongLong(timeout),
                     .block = release_gil,
                     .pause = handle_signals,
                     .argument = &parked};
    if (PyErr_Occurred()) return NULL;
    int status = (int)(self->is_message ? self->message.status : self->work.status);
    if (!is_done(self)) {
        if (!group->group) return PyLong_FromLong(UN_CLOSED);
        group->users++;
        if (self->is_message)
            status = (int)un_message_wait(group->group, &self->message, &hooks);
        else
            status = (int)un_work_wait(group->group, &self->work, &hooks);
        if (parked) PyEval_RestoreThread(parked);
        if (!--group->users && group->closing) close_now(group);
    }
    if (group->group) reap(group);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(status);
}

static void work_free(PyObject *object) {
    Work *self = (Work *)object;
    PyTypeObject *type = Py_TYPE(object);
    release_tensors(self);
    Py_XDECREF((PyObject *)self->group);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef work_methods[] = {
    {"done", work_is_done, METH_NOARGS, NULL},
    {"wait", work_wait, METH_O, NULL},
    {"seen", work_seen, METH_NOARGS, NULL},
    {0},
};

static PyType_Slot work_slots[] = {
    {Py_tp_doc, "A call that goes on by itself; made by Group.submit."},
    {Py_tp_dealloc, (void *)work_free},
    {Py_tp_methods, work_methods},
    {0, NULL},
};

static PyType_Spec work_spec = {
    .name = "unisono._native.Work",
    .basicsize = sizeof(Work),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = work_slots,
};

/* -- the group ------------------------------------------------------------------------------- */

static PyObject *group_abort(PyObject *object, PyObject *ignored) {
    (void)ignored;
    Group *self = (Group *)object;
    if (self->group) un_group_abort(self->group);
    Py_RETURN_NONE;
}

static PyObject *group_close(PyObject *object, PyObject *ignored) {
    (void)ignored;
    Group *self = (Group *)object;
    self->closing = true;
    if (self->users)
        un_group_abort(self->group); /* the last call under way closes it */
    else
        close_now(self);
    Py_RETURN_NONE;
}

/* watch(rank, identity, pidfd) */
static PyObject *group_watch(PyObject *object, PyObject *arguments) {
    Group *self = (Group *)object;
    int rank, pidfd;
    unsigned long long identity;
    if (!PyArg_ParseTuple(arguments, "iKi", &rank, &identity, &pidfd)) return NULL;
    bool watched = self->group && un_group_watch(self->group, rank, identity, pidfd);
    return PyBool_FromLong(watched);
}

static PyObject *group_failure(PyObject *object, PyObject *ignored) {
    (void)ignored;
    Group *self = (Group *)object;
    un_failure f = {.status = UN_CLOSED, .rank = -1};
    if (self->group) f = un_group_failure(self->group);
    return Py_BuildValue("iiKL", (int)f.status, f.rank, (unsigned long long)f.call,
                         (long long)f.detail);
}

static PyObject *group_posted(PyObject *object, PyObject *arguments) {
    Group *self = (Group *)object;
    int rank;
    unsigned long long call;
    if (!PyArg_ParseTuple(arguments, "iK", &rank, &call)) return NULL;
    if (!self->group || rank < 0 || rank >= self->ranks) Py_RETURN_NONE;
    un_posted p = un_group_posted(self->group, rank, call);
    return Py_BuildValue("KiiIiiKK", (unsigned long long)p.call, (int)p.operation,
                         (int)p.reduction, (unsigned)p.dtype, p.root, (int)p.refused,
                         (unsigned long long)p.bytes, (unsigned long long)p.hash);
}

/* waiting(rank): (waits, sends, peer, what) */
static PyObject *group_waiting(PyObject *object, PyObject *rank) {
    Group *self = (Group *)object;
    long number = PyLong_AsLong(rank);
    if (PyErr_Occurred()) return NULL;
    un_waiting w = {0};
    if (self->group && number >= 0 && number < self->ranks)
        w = un_group_waiting(self->group, (int)number);
    return Py_BuildValue("iiiL", (int)w.waits, (int)w.sends, w.peer, (long long)w.what);
}

static PyObject *group_set_eager(PyObject *object, PyObject *bytes) {
    Group *self = (Group *)object;
    long long number = PyLong_AsLongLong(bytes);
    if (PyErr_Occurred()) return NULL;
    if (self->group) un_group_set_eager(self->group, number);
    Py_RETURN_NONE;
}

static PyObject *group_calls(PyObject *object, void *ignored) {
    (void)ignored;
    Group *self = (Group *)object;
    return PyLong_FromUnsignedLongLong(self->group ? un_group_calls(self->group) : 0);
}

static PyObject *group_get_timeout(PyObject *object, void *ignored) {
    (void)ignored;
    return PyLong_FromLongLong(((Group *)object)->timeout_ns);
}

static int group_set_timeout(PyObject *object, PyObject *value, void *ignored) {
    (void)ignored;
    long long ns = value ? PyLong_AsLongLong(value) : -1;
    if (PyErr_Occurred()) return -1;
    ((Group *)object)->timeout_ns = ns;
    return 0;
}

static PyObject *group_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    (void)keywords;
    int descriptor, rank, ranks;
    unsigned long long nonce;
    long long timeout_ns;
    if (!PyArg_ParseTuple(arguments, "iiiKL", &descriptor, &rank, &ranks, &nonce, &timeout_ns))
        return NULL;
    un_group *group;
    un_status status = un_group_open(descriptor, rank, ranks, nonce, &group);
    if (status == UN_SYSTEM) return PyErr_SetFromErrno(PyExc_OSError);
    if (status)
        return PyErr_Format(PyExc_ValueError, "the segment is not the one that was announced");
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Group *self = (Group *)allocate(type, 0);
    if (!self) {
        un_group_close(group);
        return NULL;
    }
    self->group = group;
    self->rank = rank;
    self->ranks = ranks;
    self->timeout_ns = timeout_ns;
    return (PyObject *)self;
}

static void group_free(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    close_now((Group *)object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef group_methods[] = {
    {"all_reduce", (PyCFunction)(void (*)(void))group_all_reduce, METH_FASTCALL, NULL},
    {"run", (PyCFunction)(void (*)(void))group_run, METH_FASTCALL, NULL},
    {"submit", (PyCFunction)(void (*)(void))group_submit, METH_FASTCALL, NULL},
    {"message", (PyCFunction)(void (*)(void))group_message, METH_FASTCALL, NULL},
    {"waiting", group_waiting, METH_O, NULL},
    {"set_eager", group_set_eager, METH_O, NULL},
    {"barrier", group_barrier, METH_NOARGS, NULL},
    {"refuse", group_refuse, METH_O, NULL},
    {"abort", group_abort, METH_NOARGS, NULL},
    {"watch", group_watch, METH_VARARGS, NULL},
    {"close", group_close, METH_NOARGS, NULL},
    {"failure", group_failure, METH_NOARGS, NULL},
    {"posted", group_posted, METH_VARARGS, NULL},
    {0},
};

static PyGetSetDef group_properties[] = {
    {"calls", group_calls, NULL, NULL, NULL},
    {"timeout_ns", group_get_timeout, group_set_timeout, NULL, NULL},
    {0},
};

static PyType_Slot group_slots[] = {
    {Py_tp_doc, "A place in a group: Group(descriptor, rank, ranks, nonce, timeout_ns)."},
    {Py_tp_new, (void *)group_new},
    {Py_tp_dealloc, (void *)group_free},
    {Py_tp_methods, group_methods},
    {Py_tp_getset, group_properties},
    {0, NULL},
};

static PyType_Spec group_spec = {
    .name = "unisono._native.Group",
    .basicsize = sizeof(Group),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = group_slots,
};

/* -- the module ------------------------------------------------------------------------------ */

static PyObject *create_segment(PyObject *module, PyObject *arguments) {
    (void)module;
    int ranks, cores;
    unsigned long long nonce;
    if (!PyArg_ParseTuple(arguments, "iiK", &ranks, &cores, &nonce)) return NULL;
    int descriptor = un_segment_create(ranks, cores, nonce);
    if (descriptor < 0) return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromLong(descriptor);
}

static PyObject *cpu_quota(PyObject *module, PyObject *ignored) {
    (void)module, (void)ignored;
    return PyLong_FromLong(un_cpu_quota());
}

static PyObject *memory_room(PyObject *module, PyObject *ignored) {
    (void)module, (void)ignored;
    return PyLong_FromLongLong(un_memory_room());
}

static PyMethodDef module_methods[] = {
    {"create_segment", create_segment, METH_VARARGS, NULL},
    {"cpu_quota", cpu_quota, METH_NOARGS, NULL},
    {"memory_room", memory_room, METH_NOARGS, NULL},
    {0},
};

static int fill_module(PyObject *module) {
    PyObject *type = PyType_FromSpec(&group_spec);
    if (!type || PyModule_AddObjectRef(module, "Group", type)) return -1;
    Py_DECREF(type);
    if (!work_type) work_type = (PyTypeObject *)PyType_FromSpec(&work_spec);
    if (!work_type) return -1;
    static const char *const names[UN_PREMUL_SUM] = {"sum", "avg",  "product", "min",
                                                     "max", "band", "bor",     "bxor"};
    for (int i = 0; i < UN_PREMUL_SUM; i++)
        if (!reduction_names[i] && !(reduction_names[i] = PyUnicode_InternFromString(names[i])))
            return -1;
    return PyModule_AddIntConstant(module, "LAYOUT_VERSION", UN_LAYOUT_VERSION);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)fill_module}, {0, NULL}};

static PyModuleDef module_definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "unisono._native",
    .m_doc = "The engine. Use unisono.comm.engine.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void);
PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_definition); }
