/* Works: asynchronous calls. */
#include "binding.h"

typedef struct Work {
    Pending pending;
    un_work work;
    call_arguments arguments;
    PyObject *kept; /* alive: tensors and schedule; NULL once the work is done */
} Work;

static PyTypeObject *work_type;

static bool is_done(const Pending *p) { return un_work_done(&((const Work *)p)->work); }

static un_status result(const Pending *p) { return ((const Work *)p)->work.status; }

static un_status await(un_group *group, Pending *p, const un_call *hooks) {
    return un_work_wait(group, &((Work *)p)->work, hooks);
}

static PyObject *make_exception(Pending *p, un_status status) {
    const un_call *call = &((Work *)p)->work.call;
    return PyObject_CallMethod(p->exceptions, "call_error", "iiiI", (int)status,
                               (int)call->operation, (int)call->reduction, (unsigned)call->dtype);
}

static bool test(un_group *group, Pending *p) { return un_work_test(group, &((Work *)p)->work); }

static void release(Pending *p) {
    Work *self = (Work *)p;
    if (!self->kept) return;
    free_tensors(&self->arguments);
    Py_CLEAR(self->kept);
}

static un_status is_under_way(un_group *group, const Pending *p) {
    return un_work_is_under_way(group, &((const Work *)p)->work);
}

static const kind work_kind = {is_done, test,           result, await,
                               release, make_exception, NULL,   is_under_way};

/* submit(exceptions, ...), then the arguments of run: a Work, or a status. */
PyObject *group_submit(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Group *self = (Group *)object;
    if (count < 1) return PyErr_Format(PyExc_TypeError, "submit needs an exception factory");
    if (!self->group || self->closing) return PyLong_FromLong(UN_CLOSED);
    if (self->pending) reap(self);
    Work *work = (Work *)new_pending(work_type, &work_kind, arguments[0]);
    if (!work) return NULL;
    call_arguments *a = &work->arguments;
    start_side(&a->in);
    start_side(&a->out);
    int failed = parse_call(a, self, arguments + 1, count - 1);
    if (!failed &&
        !(work->kept = PyTuple_Pack(4, a->output, a->input, a->schedule_bytes, a->residual)))
        failed = -1;
    if (!failed && a->call.operation != UN_BARRIER) failed = read_tensors(a, self);
    if (failed) {
        Py_DECREF((PyObject *)work);
        return status_of(failed);
    }
    if (!a->call.timeout_ns) a->call.timeout_ns = self->timeout_ns;
    a->call.site = current_site();
    work->work.call = a->call;
    un_status status = un_submit(self->group, &work->work);
    if (!status) return keep(self, &work->pending);
    Py_DECREF((PyObject *)work);
    return PyLong_FromLong(status);
}

int prepare_works(PyObject *module) {
    return add_pending_type(module, &work_type, "unisono._native.Work", "An asynchronous call.",
                            sizeof(Work));
}
