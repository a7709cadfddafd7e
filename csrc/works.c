/* Works: calls that go on by themselves; and what they share with messages, that the group holds
 * on to whatever is under way, and it to its tensors. */
#include "binding.h"

/* -- whatever is under way ---------------------------------------------------------------------- */

/* Let go of what is done. Called with the GIL, whenever the group is used. */
void reap(Group *self) {
    for (Pending **link = &self->pending; *link;) {
        Pending *p = *link;
        if (!p->is_done(p)) {
            link = &p->next;
            continue;
        }
        *link = p->next;
        p->release(p);
        Py_DECREF((PyObject *)p);
    }
}

Pending *new_pending(PyTypeObject *type, bool (*is_done)(const Pending *),
                     void (*release)(Pending *)) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Pending *p = (Pending *)allocate(type, 0);
    if (!p) return NULL;
    p->is_done = is_done;
    p->release = release;
    return p;
}

/* The group holds on to it until it is done. */
PyObject *keep(Group *self, Pending *p) {
    Py_INCREF((PyObject *)self);
    p->group = self;
    Py_INCREF((PyObject *)p);
    p->next = self->pending;
    self->pending = p;
    return (PyObject *)p;
}

void free_pending(PyObject *object) {
    Pending *p = (Pending *)object;
    PyTypeObject *type = Py_TYPE(object);
    p->release(p);
    Py_XDECREF((PyObject *)p->group);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

PyObject *pending_is_done(PyObject *object, PyObject *ignored) {
    (void)ignored;
    const Pending *p = (const Pending *)object;
    return PyBool_FromLong(p->is_done(p));
}

/* wait(timeout_ns): a status; a negative timeout waits for as long as it takes. */
PyObject *wait_for_pending(Pending *p, PyObject *timeout, awaiting *await) {
    Group *group = p->group;
    PyThreadState *parked = NULL;
    un_call hooks = {.timeout_ns = PyLong_AsLongLong(timeout),
                     .block = release_gil,
                     .pause = handle_signals,
                     .argument = &parked};
    if (PyErr_Occurred()) return NULL;
    if (p->is_done(p)) {
        un_status status = await(NULL, p, NULL);
        if (group->pending) reap(group);
        return PyLong_FromLong(status);
    }
    if (!group->group) return PyLong_FromLong(UN_CLOSED);
    group->users++;
    un_status status = await(group->group, p, &hooks);
    if (parked) PyEval_RestoreThread(parked);
    if (!--group->users && group->closing) close_now(group);
    if (group->pending) reap(group);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(status);
}

/* -- works --------------------------------------------------------------------------------------- */

typedef struct Work {
    Pending pending;
    un_work work;
    side in, out;
    PyObject *tensors; /* NULL once the work is done */
} Work;

static PyTypeObject *work_type;

static bool is_done(const Pending *p) { return un_work_done(&((const Work *)p)->work); }

static void release(Pending *p) {
    Work *self = (Work *)p;
    if (!self->tensors) return;
    free_side(&self->in);
    free_side(&self->out);
    Py_CLEAR(self->tensors);
}

/* submit(...), with the arguments of run: a Work, or a status. */
PyObject *group_submit(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Group *self = (Group *)object;
    un_call call;
    bool coalesced;
    if (read_call(&call, &coalesced, arguments, count)) return NULL;
    if (!self->group || self->closing) return PyLong_FromLong(UN_CLOSED);
    if (self->pending) reap(self);
    Work *work = (Work *)new_pending(work_type, is_done, release);
    if (!work) return NULL;
    start_side(&work->in);
    start_side(&work->out);
    work->tensors = PyTuple_Pack(2, arguments[1], arguments[2]);
    int failed = work->tensors ? 0 : -1;
    if (!failed && call.operation != UN_BARRIER)
        failed = read_arguments(self, &call, arguments[1], arguments[2], coalesced, &work->in,
                                &work->out);
    call.timeout_ns = self->timeout_ns;
    call.site = current_site();
    work->work.call = call;
    un_status status = failed ? UN_OK : un_submit(self->group, &work->work);
    if (failed || status) {
        Py_DECREF((PyObject *)work);
        return failed ? NULL : PyLong_FromLong(status);
    }
    return keep(self, &work->pending);
}

static un_status await(un_group *group, Pending *p, const un_call *hooks) {
    un_work *work = &((Work *)p)->work;
    return hooks ? un_work_wait(group, work, hooks) : work->status;
}

static PyObject *work_wait(PyObject *object, PyObject *timeout) {
    return wait_for_pending((Pending *)object, timeout, await);
}

static PyMethodDef work_methods[] = {
    {"done", pending_is_done, METH_NOARGS, NULL},
    {"wait", work_wait, METH_O, NULL},
    {0},
};

static PyType_Slot work_slots[] = {
    {Py_tp_doc, "A call that goes on by itself; made by Group.submit."},
    {Py_tp_dealloc, (void *)free_pending},
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
