/* Works: asynchronous calls. */
#include "binding.h"

static PyTypeObject *work_type;

/* submit(exceptions, ...), then the arguments of run: a Work, or a status. */
PyObject *group_submit(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Group *self = (Group *)object;
    if (count < 1) return PyErr_Format(PyExc_TypeError, "submit needs an exception factory");
    if (!self->group || self->closing) return PyLong_FromLong(UN_CLOSED);
    if (self->pending) reap(self);
    Work *work = (Work *)new_pending(work_type, false, arguments[0]);
    if (!work) return NULL;
    call_arguments *a = &work->arguments;
    start_side(&a->in);
    start_side(&a->out);
    int failed = parse_call(a, self, arguments + 1, count - 1);
    if (!failed) {
        work->pending.kept = PyTuple_Pack(4, a->output, a->input, a->schedule_bytes, a->residual);
        if (!work->pending.kept) failed = -1;
    }
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
