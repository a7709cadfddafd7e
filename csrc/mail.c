/* Messages as Python sends them: blocking ones live on the stack, others in an object. */
#include "binding.h"

/* A message under way. Its group holds on to it, and it to its tensor. */
typedef struct Message {
    Pending pending;
    un_message message;
    tensor tensor;
    un_view view;
    PyObject *owner; /* the tensor; NULL once the message is over */
} Message;

static PyTypeObject *message_type;

/* (tensor, peer, tag) into a message. */
static int read_message(Group *self, bool sends, PyObject *const *arguments, Py_ssize_t count,
                        un_message *m, tensor *t, un_view *view) {
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "a message has 3 arguments");
        return -1;
    }
    int peer = (int)PyLong_AsLong(arguments[1]);
    int64_t tag = PyLong_AsLongLong(arguments[2]);
    if (PyErr_Occurred() || read_one(t, view, arguments[0], !sends)) return -1;
    *m = (un_message){.sends = sends,
                      .peer = peer,
                      .tag = tag,
                      .dtype = t->dtype,
                      .stream = {.views = view, .count = 1, .bytes = t->bytes},
                      .timeout_ns = self->timeout_ns};
    return 0;
}

static PyObject *run_message(Group *self, bool sends, PyObject *const *arguments,
                             Py_ssize_t count) {
    un_message m;
    tensor t;
    un_view view;
    if (!self->group || self->closing) return PyLong_FromLong(-UN_CLOSED);
    if (self->pending) reap(self);
    start_tensor(&t);
    if (read_message(self, sends, arguments, count, &m, &t, &view)) {
        free_tensor(&t);
        return NULL;
    }
    PyThreadState *parked = NULL;
    un_call hooks = {.timeout_ns = -1,
                     .block = release_gil,
                     .pause = handle_signals,
                     .argument = &parked};
    if (self->keeps_sites) m.site = current_site();
    self->users++;
    if (t.bytes > SMALL_BYTES) release_gil(&parked);
    un_status status = un_message_run(self->group, &m, &hooks);
    if (parked) PyEval_RestoreThread(parked);
    if (status) {
        tell_site(self->group, UN_ABOUT_MESSAGES);
        self->seen = (seen){m.source, m.seen_bytes, m.seen_dtype};
    }
    if (!--self->users && self->closing) close_now(self);
    free_tensor(&t);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(status ? -(long)status : m.source);
}

/* send(tensor, peer, tag), recv(tensor, peer, tag): the rank at the other end, or a status
 * below zero. */
PyObject *group_send(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    return run_message((Group *)object, true, arguments, count);
}

PyObject *group_recv(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    return run_message((Group *)object, false, arguments, count);
}

/* About the blocking message that failed last: who sent it, its bytes and its type. */
PyObject *group_seen(PyObject *object, PyObject *ignored) {
    (void)ignored;
    const seen *s = &((Group *)object)->seen;
    return Py_BuildValue("iKI", s->source, (unsigned long long)s->bytes, (unsigned)s->dtype);
}

/* -- messages that go on by themselves ---------------------------------------------------------- */

static bool is_done(const Pending *p) { return un_message_done(&((const Message *)p)->message); }

static void release(Pending *p) {
    Message *self = (Message *)p;
    if (!self->owner) return;
    free_tensor(&self->tensor);
    Py_CLEAR(self->owner);
}

static PyObject *start_message(Group *self, bool sends, PyObject *const *arguments,
                               Py_ssize_t count) {
    if (!self->group || self->closing) return PyLong_FromLong(UN_CLOSED);
    if (self->pending) reap(self);
    Message *m = (Message *)new_pending(message_type, is_done, release);
    if (!m) return NULL;
    start_tensor(&m->tensor);
    if (read_message(self, sends, arguments, count, &m->message, &m->tensor, &m->view)) {
        free_tensor(&m->tensor);
        Py_DECREF((PyObject *)m);
        return NULL;
    }
    Py_INCREF(arguments[0]);
    m->owner = arguments[0];
    m->message.site = current_site();
    PyThreadState *parked = NULL;
    PyObject *result = keep(self, &m->pending);
    self->users++;
    if (m->message.stream.bytes > SMALL_BYTES) release_gil(&parked);
    un_message_start(self->group, &m->message);
    if (parked) PyEval_RestoreThread(parked);
    if (!--self->users && self->closing) close_now(self);
    return result;
}

/* isend(tensor, peer, tag), irecv(tensor, peer, tag): a Message, or a status. */
PyObject *group_isend(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    return start_message((Group *)object, true, arguments, count);
}

PyObject *group_irecv(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    return start_message((Group *)object, false, arguments, count);
}

static un_status await(un_group *group, Pending *p, const un_call *hooks) {
    un_message *m = &((Message *)p)->message;
    return hooks ? un_message_wait(group, m, hooks) : m->status;
}

static PyObject *message_wait(PyObject *object, PyObject *timeout) {
    return wait_for_pending((Pending *)object, timeout, await);
}

/* Who sent it, and the bytes and type that it had. */
static PyObject *message_seen(PyObject *object, PyObject *ignored) {
    (void)ignored;
    const un_message *m = &((Message *)object)->message;
    return Py_BuildValue("iKI", m->source, (unsigned long long)m->seen_bytes,
                         (unsigned)m->seen_dtype);
}

static PyMethodDef message_methods[] = {
    {"done", pending_is_done, METH_NOARGS, NULL},
    {"wait", message_wait, METH_O, NULL},
    {"seen", message_seen, METH_NOARGS, NULL},
    {0},
};

static PyType_Slot message_slots[] = {
    {Py_tp_doc, "A message that goes on by itself; made by Group.isend and Group.irecv."},
    {Py_tp_dealloc, (void *)free_pending},
    {Py_tp_methods, message_methods},
    {0, NULL},
};

static PyType_Spec message_spec = {
    .name = "unisono._native.Message",
    .basicsize = sizeof(Message),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = message_slots,
};

int prepare_mail(void) {
    if (!message_type) message_type = (PyTypeObject *)PyType_FromSpec(&message_spec);
    return message_type ? 0 : -1;
}
