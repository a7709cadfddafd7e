/* Pending operations: works and messages. The group keeps them alive until they are done, and
 * they keep their tensors alive. To the program each is a Work (comm/work.py). */
#include "binding.h"
#include <structmember.h>

enum { LOOKS = 16 }; /* at a time, so that thousands do not slow down each use of the group */

static un_work *work_of(const Pending *p) { return &((Work *)(uintptr_t)p)->work; }

static un_message *message_of(const Pending *p) { return &((Message *)(uintptr_t)p)->message; }

static bool is_done(const Pending *p) {
    return p->is_message ? un_message_done(message_of(p)) : un_work_done(work_of(p));
}

static un_status result_of(const Pending *p) { /* once done */
    return p->is_message ? message_of(p)->status : work_of(p)->status;
}

PyObject *make_exception(const Pending *p, un_status status) {
    if (p->is_message) {
        const un_message *m = message_of(p);
        return PyObject_CallMethod(p->exceptions, "message_error", "iOiL", (int)status,
                                   m->sends ? Py_True : Py_False, m->peer, (long long)m->tag);
    }
    const un_call *call = &work_of(p)->call;
    return PyObject_CallMethod(p->exceptions, "call_error", "iiiI", (int)status,
                               (int)call->operation, (int)call->reduction, (unsigned)call->dtype);
}

/* Drop the tensors; may be called twice. */
static void release(Pending *p) {
    PyObject *kept = p->kept;
    p->kept = NULL;
    if (!kept) return;
    if (p->is_message)
        free_tensor(&((Message *)p)->tensor);
    else
        free_tensors(&((Work *)p)->arguments);
    Py_DECREF(kept);
}

/* A finished operation belongs to its owner alone. Dropping tensors may run any code. */
static void let_go(Group *self, Pending *p) {
    *(p->previous ? &p->previous->next : &self->pending) = p->next;
    if (p->next) p->next->previous = p->previous;
    if (self->next_look == p) self->next_look = p->next;
    p->is_kept = false;
    release(p);
    Py_DECREF((PyObject *)p);
}

/* Release some that are done. Called with the GIL, whenever the group is used. */
void reap(Group *self) {
    for (int looks = 0; looks < LOOKS && self->pending; looks++) {
        Pending *p = self->next_look ? self->next_look : self->pending;
        self->next_look = p->next;
        if (is_done(p)) let_go(self, p);
        if (!self->next_look) return;
    }
}

static void reap_all(Group *self) {
    self->next_look = NULL;
    do reap(self);
    while (self->next_look);
}

/* The group was dropped: release all works that are done; returns whether others, or operators, are
 * under way. */
PyObject *group_release_works(PyObject *object, PyObject *ignored) {
    (void)ignored;
    Group *self = (Group *)object;
    forget_operators_of(self);
    reap_all(self);
    return PyBool_FromLong(self->pending || self->users);
}

/* A call that released the GIL, if `parked`, is over; close() may have waited for it. */
void end_use(Group *self, PyThreadState *parked) {
    if (parked) PyEval_RestoreThread(parked);
    if (!--self->users && self->closing) close_now(self);
}

void close_now(Group *self) {
    un_group *group = self->group;
    self->group = NULL;
    if (!group) return;
    self->users++; /* another thread that closes it waits until it is closed */
    PyThreadState *parked = PyEval_SaveThread();
    un_group_close(group);
    PyEval_RestoreThread(parked);
    self->users--;
    reap_all(self); /* all are done */
}

Pending *new_pending(PyTypeObject *type, bool is_message, PyObject *exceptions) {
    Pending *p = (Pending *)PyType_GenericAlloc(type, 0);
    if (!p) return NULL;
    p->is_message = is_message;
    p->exceptions = Py_NewRef(exceptions);
    return p;
}

PyObject *keep(Group *self, Pending *p) {
    Py_INCREF((PyObject *)self);
    p->group = self;
    Py_INCREF((PyObject *)p);
    p->next = self->pending;
    if (p->next) p->next->previous = p;
    self->pending = p;
    p->is_kept = true;
    return (PyObject *)p;
}

/* The memory of an object of one of our types, which holds a reference to its type. */
void free_object(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_Free(object);
    Py_DECREF(type);
}

static void free_pending(PyObject *object) {
    Pending *p = (Pending *)object;
    if (p->weak_references) PyObject_ClearWeakRefs(object);
    release(p);
    Py_XDECREF((PyObject *)p->group);
    Py_XDECREF(p->exceptions);
    free_object(object);
}

/* A status, or -1 with an exception (Ctrl-C). */
static int wait_until_done(Pending *p, int64_t timeout_ns) {
    Group *group = p->group;
    int status;
    if (is_done(p)) {
        status = (int)result_of(p);
    } else if (!group->group) {
        status = UN_CLOSED;
    } else {
        PyThreadState *parked = NULL;
        un_call hooks = hooks_for(&parked, timeout_ns);
        group->users++;
        status = (int)(p->is_message ? un_message_wait(group->group, message_of(p), &hooks)
                                     : un_work_wait(group->group, work_of(p), &hooks));
        end_use(group, parked);
    }
    if (p->is_kept && is_done(p)) let_go(group, p);
    if (group->pending) reap(group);
    return PyErr_Occurred() ? -1 : status;
}

/* Raise a new exception; NULL: another one is set already. */
void raise_error(PyObject *error) {
    if (error) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
}

/* Seconds as nanoseconds; a century means forever. */
static int read_timeout(PyObject *object, int64_t *timeout_ns) {
    *timeout_ns = -1;
    if (object == Py_None) return 0;
    double seconds = PyFloat_AsDouble(object);
    if (seconds == -1 && PyErr_Occurred()) return -1;
    if (!(seconds > 0)) seconds = 0;
    *timeout_ns = (int64_t)((seconds < 3.2e9 ? seconds : 3.2e9) * 1e9);
    return 0;
}

/* wait(timeout_s=None) */
static PyObject *pending_wait(PyObject *object, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"timeout_s", NULL};
    PyObject *timeout = Py_None;
    int64_t timeout_ns;
    if ((keywords || PyTuple_Size(arguments)) &&
        !PyArg_ParseTupleAndKeywords(arguments, keywords, "|O", names, &timeout))
        return NULL;
    if (read_timeout(timeout, &timeout_ns)) return NULL;
    Pending *p = (Pending *)object;
    int status = wait_until_done(p, timeout_ns);
    if (!status) Py_RETURN_NONE;
    if (status > 0) raise_error(make_exception(p, (un_status)status));
    return NULL;
}

static PyObject *pending_is_completed(PyObject *object, PyObject *ignored) {
    (void)ignored;
    Pending *p = (Pending *)object;
    un_group *group = p->group->group;
    bool tests = !p->is_message && group && !p->group->closing;
    bool is_over = tests ? un_work_test(group, work_of(p)) : is_done(p);
    if (is_over && p->is_kept) let_go(p->group, p); /* then a lazy tensor has its values */
    return PyBool_FromLong(is_over);
}

/* is_under_way(): whether it will finish soon by itself; None: better to wait for it */
static PyObject *pending_is_under_way(PyObject *object, PyObject *ignored) {
    (void)ignored;
    Pending *p = (Pending *)object;
    un_group *group = p->group->group;
    if (p->is_message || !group || p->group->closing) Py_RETURN_NONE;
    un_status status = un_work_is_under_way(group, work_of(p));
    if (status && status != UN_NOT_YET) Py_RETURN_NONE;
    return PyBool_FromLong(!status);
}

static PyObject *pending_exception(PyObject *object, PyObject *ignored) {
    (void)ignored;
    Pending *p = (Pending *)object;
    un_status status = is_done(p) ? result_of(p) : UN_OK;
    if (!status) Py_RETURN_NONE;
    return make_exception(p, status);
}

static PyObject *pending_source_rank(PyObject *object, PyObject *ignored) {
    (void)ignored;
    const Pending *p = (const Pending *)object;
    if (!p->is_message)
        return PyErr_Format(PyExc_ValueError, "this work has not received a message");
    if (!is_done(p)) return PyErr_Format(PyExc_ValueError, "this message has not arrived yet");
    return PyLong_FromLong(message_of(p)->source);
}

static PyMethodDef pending_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))pending_wait, METH_VARARGS | METH_KEYWORDS, NULL},
    {"is_completed", pending_is_completed, METH_NOARGS, NULL},
    {"is_under_way", pending_is_under_way, METH_NOARGS, NULL},
    {"exception", pending_exception, METH_NOARGS, NULL},
    {"source_rank", pending_source_rank, METH_NOARGS, NULL},
    {0},
};

static PyMemberDef pending_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Pending, weak_references), READONLY, NULL},
    {0},
};

/* Add a type whose objects begin with a Pending. */
int add_pending_type(PyObject *module, PyTypeObject **type, const char *name, const char *what,
                     int bytes) {
    PyType_Slot slots[] = {
        {Py_tp_doc, (void *)(uintptr_t)what},
        {Py_tp_dealloc, (void *)free_pending},
        {Py_tp_methods, pending_methods},
        {Py_tp_members, pending_members},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = name,
        .basicsize = bytes,
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = slots,
    };
    if (!*type) *type = (PyTypeObject *)PyType_FromSpec(&spec);
    return *type ? PyModule_AddType(module, *type) : -1;
}
