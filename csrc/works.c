/* Works: calls and messages that go on by themselves, and what keeps their tensors alive. */
#include "binding.h"

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
void reap(Group *self) {
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
PyObject *group_submit(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
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

/* message(sends, tensor, peer, tag, blocking): a Work, done already if blocking; in a forked
 * child a status. */
PyObject *group_message(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
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
                                 .stream = work->in.streams[0],
                                 .timeout_ns = self->timeout_ns};
    PyThreadState *parked = NULL;
    un_call hooks = {.timeout_ns = -1,
                     .block = release_gil,
                     .pause = handle_signals,
                     .argument = &parked};
    self->users++;
    keep(self, work);
    un_status status = blocking ? un_message_run(self->group, &work->message, &hooks)
                                : un_message_start(self->group, &work->message);
    if (parked) PyEval_RestoreThread(parked);
    if (!--self->users && self->closing) close_now(self);
    if (self->pending) reap(self);
    if (status != UN_FORKED && !PyErr_Occurred()) return (PyObject *)work;
    Py_DECREF((PyObject *)work);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(status);
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

int prepare_works(void) {
    if (!work_type) work_type = (PyTypeObject *)PyType_FromSpec(&work_spec);
    return work_type ? 0 : -1;
}
