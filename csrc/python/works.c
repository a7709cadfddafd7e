/* Works: calls that go on by themselves. */
#include "binding.h"

typedef struct Work {
    Pending pending;
    un_work work;
    side in, out;
    un_program program;
    PyObject *tensors; /* and the program's words; NULL once the work is done */
} Work;

static PyTypeObject *work_type;

static bool is_done(const Pending *p) { return un_work_done(&((const Work *)p)->work); }

static un_status result(const Pending *p) { return ((const Work *)p)->work.status; }

static un_status await(un_group *group, Pending *p, const un_call *hooks) {
    return un_work_wait(group, &((Work *)p)->work, hooks);
}

static PyObject *blame(Pending *p, un_status status) {
    const un_call *call = &((Work *)p)->work.call;
    return PyObject_CallMethod(p->blamer, "call_error", "iiiI", (int)status, (int)call->operation,
                               (int)call->reduction, (unsigned)call->dtype);
}

static void release(Pending *p) {
    Work *self = (Work *)p;
    if (!self->tensors) return;
    free_side(&self->in);
    free_side(&self->out);
    Py_CLEAR(self->tensors);
}

static const kind work_kind = {is_done, result, await, release, blame, NULL};

/* submit(blamer, ...), then the arguments of run: a Work, or a status. */
PyObject *group_submit(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Group *self = (Group *)object;
    un_call call;
    bool coalesced;
    if (count < 1) return PyErr_Format(PyExc_TypeError, "submit needs a blamer");
    PyObject *blamer = *arguments++;
    if (read_call(&call, &coalesced, arguments, count - 1)) return NULL;
    if (!self->group || self->closing) return PyLong_FromLong(UN_CLOSED);
    if (self->pending) reap(self);
    Work *work = (Work *)new_pending(work_type, &work_kind, blamer);
    if (!work) return NULL;
    start_side(&work->in);
    start_side(&work->out);
    PyObject *words = count == 9 ? arguments[7] : Py_None;
    work->tensors = PyTuple_Pack(3, arguments[1], arguments[2], words);
    int failed = work->tensors ? read_program(self, &call, &work->program, words) : -1;
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

int prepare_works(PyObject *module) {
    if (!work_type)
        work_type = make_pending_type("unisono._native.Work", "A call that goes on by itself.",
                                      sizeof(Work));
    return work_type ? PyModule_AddObjectRef(module, "Work", (PyObject *)work_type) : -1;
}
