/* Messages as Python sends them: blocking ones live on the stack, others in an object. */
#include "binding.h"

static PyTypeObject *message_type;

/* The rank at the other end; -1 is any source, for a receive. */
static bool read_peer(const Group *self, bool sends, PyObject *object, int *peer) {
    if (self->ranks == 1) return false;
    bool is_any = object == Py_None && !sends;
    long number = PyLong_CheckExact(object) ? PyLong_AsLong(object) : -1;
    PyErr_Clear();
    *peer = (int)number;
    return is_any || (number >= 0 && number < self->ranks);
}

/* (tensor, peer, tag) into a message: 0, or why not. */
static int read_message(Group *self, bool sends, PyObject *const *arguments, Py_ssize_t count,
                        un_message *m, tensor *t, un_view *view) {
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "a message takes 3 arguments");
        return -1;
    }
    int peer;
    if (!read_peer(self, sends, arguments[1], &peer)) return REFUSED;
    int64_t tag = PyLong_AsLongLong(arguments[2]);
    if (PyErr_Occurred()) return refuse();
    int failed = read_one(t, view, arguments[0], !sends);
    if (failed) return failed;
    *m = (un_message){.sends = sends,
                      .peer = peer,
                      .tag = tag,
                      .dtype = t->dtype,
                      .shape = &t->shape,
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
    int failed = read_message(self, sends, arguments, count, &m, &t, &view);
    if (failed) {
        free_tensor(&t);
        return failed < 0 ? NULL : PyLong_FromLong(failed == IN_A_GPU ? -ON_DEVICE : -ASK_AGAIN);
    }
    PyThreadState *parked = NULL;
    un_call hooks = hooks_for(&parked, -1);
    if (self->keeps_sites || all_sites_are_kept) m.site = current_site();
    self->users++;
    if (t.bytes > SMALL_BYTES) release_gil(&parked);
    un_status status = un_message_run(self->group, &m, &hooks);
    if (parked) PyEval_RestoreThread(parked);
    if (status) write_site_note(self->group, UN_ABOUT_MESSAGES);
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

/* -- asynchronous messages ---------------------------------------------------------------------- */

static PyObject *start_message(Group *self, bool sends, PyObject *const *arguments,
                               Py_ssize_t count) {
    if (count != 5) return PyErr_Format(PyExc_TypeError, "a message takes 5 arguments");
    if (!self->group || self->closing) {
        raise_error(PyObject_CallMethod(arguments[0], "call_error", "ii", (int)UN_CLOSED,
                                        (int)(sends ? UN_SEND : UN_RECV)));
        return NULL;
    }
    if (self->pending) reap(self);
    Message *m = (Message *)new_pending(message_type, true, arguments[0]);
    if (!m) return NULL;
    start_tensor(&m->tensor);
    m->pending.kept = Py_NewRef(arguments[2]);
    int failed = read_message(self, sends, arguments + 2, count - 2, &m->message, &m->tensor,
                              &m->view);
    if (failed) {
        Py_DECREF((PyObject *)m);
        return status_of(failed);
    }
    m->message.site = site_of_frame(arguments[1]);
    PyThreadState *parked = NULL;
    PyObject *kept = keep(self, &m->pending);
    self->users++;
    if (m->message.stream.bytes > SMALL_BYTES) release_gil(&parked);
    un_status status = un_message_start(self->group, &m->message);
    end_use(self, parked);
    if (!status) return kept;
    raise_error(make_exception(&m->pending, status));
    Py_DECREF(kept);
    return NULL;
}

/* isend(exceptions, frame, tensor, peer, tag) and irecv: a Message, or a status. */
PyObject *group_isend(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    return start_message((Group *)object, true, arguments, count);
}

PyObject *group_irecv(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    return start_message((Group *)object, false, arguments, count);
}

int prepare_messages(PyObject *module) {
    return add_pending_type(module, &message_type, "unisono._native.Message",
                            "An asynchronous message.", sizeof(Message));
}
