/* The Python module unisono._native: a thin layer over unisono.h on the limited C API. */
#include <string.h>
#include <time.h>

#include "binding.h"
#include <structmember.h>

enum { CLOSE_PATIENCE_MS = 100, CLOSING_MS = 5000 };

/* -- the group ------------------------------------------------------------------------------- */

/* abort(reason) */
static PyObject *group_abort(PyObject *object, PyObject *reason) {
    Group *self = (Group *)object;
    const char *text = PyUnicode_AsUTF8AndSize(reason, NULL);
    if (!text) return NULL;
    if (self->group) un_group_abort(self->group, text);
    Py_RETURN_NONE;
}

/* decide(book, serial[, value]): the first member's value; -1: no longer known or, without a value,
 * none yet. Those of the program are in book 0, those among the survivors in book 1. */
static PyObject *group_decide(PyObject *object, PyObject *arguments) {
    Group *self = (Group *)object;
    unsigned book, serial, value = UN_NOTHING;
    if (!PyArg_ParseTuple(arguments, "II|I", &book, &serial, &value)) return NULL;
    bool is_known = self->group && book < UN_BOOKS;
    return PyLong_FromLongLong(is_known ? un_group_decide(self->group, (un_book)book, serial, value)
                                        : -1);
}

/* write_note(kind, about, text) */
static PyObject *group_write_note(PyObject *object, PyObject *arguments) {
    Group *self = (Group *)object;
    int kind;
    unsigned long long about;
    PyObject *note;
    if (!PyArg_ParseTuple(arguments, "iKU", &kind, &about, &note)) return NULL;
    const char *text = PyUnicode_AsUTF8AndSize(note, NULL);
    if (!text) return NULL;
    if (self->group) un_group_write_note(self->group, (un_note)kind, about, text);
    Py_RETURN_NONE;
}

/* owner(address): the rank whose part of a block of the group lies there, or -1 */
static PyObject *group_owner(PyObject *object, PyObject *address) {
    Group *self = (Group *)object;
    const char *data = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromLong(self->group ? un_group_owner(self->group, data, 1) : -1);
}

/* finish(): None once nothing is under way; or the ranks that have not joined what is */
static PyObject *group_finish(PyObject *object, PyObject *ignored) {
    (void)ignored;
    Group *self = (Group *)object;
    if (!self->group || self->closing) Py_RETURN_NONE;
    bool missing[UN_MAX_RANKS];
    PyThreadState *parked = NULL;
    un_call hooks = hooks_for(&parked, 0);
    self->users++;
    bool finished = un_group_finish(self->group, &hooks, missing);
    end_use(self, parked);
    if (PyErr_Occurred()) return NULL;
    if (finished) Py_RETURN_NONE;
    return ranks_in(self, missing);
}

/* Other threads may be about to return from the same wait: give them a moment. A call that is
 * really under way is aborted, and closes the group as it leaves; a thread that is already
 * closing it is waited for. */
static PyObject *group_close(PyObject *object, PyObject *ignored) {
    (void)ignored;
    Group *self = (Group *)object;
    self->closing = true;
    forget_operators_of(self);
    for (int ms = 0; self->users && ms < (self->group ? CLOSE_PATIENCE_MS : CLOSING_MS); ms++) {
        PyThreadState *parked = PyEval_SaveThread();
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        PyEval_RestoreThread(parked);
    }
    if (self->users && self->group)
        un_group_abort(self->group, "it closed the group during a call");
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
    return PyBool_FromLong(self->group && un_group_watch(self->group, rank, identity, pidfd));
}

/* set_flags(address); 0: no flags */
static PyObject *group_set_flags(PyObject *object, PyObject *address) {
    Group *self = (Group *)object;
    void *flags = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return NULL;
    if (self->group) un_group_set_flags(self->group, flags);
    Py_RETURN_NONE;
}

static PyObject *group_failure(PyObject *object, PyObject *ignored) {
    (void)ignored;
    Group *self = (Group *)object;
    un_failure f = {.status = UN_CLOSED, .rank = -1};
    if (self->group) f = un_group_failure(self->group);
    return Py_BuildValue("iiKL", (int)f.status, f.rank, (unsigned long long)f.call,
                         (long long)f.detail);
}

/* state(rank=-1, call=0): figures of the group, and what a rank of it did; see group_types.py */
static PyObject *group_state(PyObject *object, PyObject *arguments) {
    const Group *self = (Group *)object;
    int rank = -1;
    unsigned long long call = 0;
    if (!PyArg_ParseTuple(arguments, "|iK", &rank, &call)) return NULL;
    un_group *g = self->group;
    bool is_asked = g && rank >= 0 && rank < self->ranks;
    un_state s = g ? un_group_state(g, is_asked ? rank : 0, call) : (un_state){.descriptor = -1};
    if (!is_asked) s = (un_state){.calls = s.calls, .reads = s.reads, .descriptor = s.descriptor};
    const un_waiting *w = &s.waiting;
    const un_posted *p = &s.posted;
    return Py_BuildValue(
        "{s:K,s:K,s:i,s:O,s:N,s:K,s:(iiiiLKL),s:(KiiIiiKK),s:N}", "calls",
        (unsigned long long)s.calls, "reads", (unsigned long long)s.reads, "descriptor",
        s.descriptor, "has_closed", s.has_closed ? Py_True : Py_False, "loss",
        s.is_lost ? PyLong_FromLongLong(s.ending) : Py_NewRef(Py_None), "progress",
        (unsigned long long)s.progress, "waiting", (int)w->waits, (int)w->sends, (int)w->is_started,
        w->peer, (long long)w->tag, (unsigned long long)w->unmatched, (long long)w->unmatched_tag,
        "posted", (unsigned long long)p->call, (int)p->operation, (int)p->reduction,
        (unsigned)p->dtype, p->root, (int)p->refused, (unsigned long long)p->bytes,
        (unsigned long long)p->hash, "sizes",
        as_tuple((const int64_t *)s.sizes, s.sizes && call ? 2 * (size_t)self->ranks : 0));
}

/* unmatched(source): (how many messages match no receive, the tag of the oldest) */
static PyObject *group_unmatched(PyObject *object, PyObject *source) {
    Group *self = (Group *)object;
    long number = PyLong_AsLong(source);
    if (PyErr_Occurred()) return NULL;
    int64_t tag = 0;
    uint64_t count = 0;
    if (self->group && number >= -1 && number < self->ranks)
        count = un_group_unmatched(self->group, (int)number, &tag);
    return Py_BuildValue("KL", (unsigned long long)count, (long long)tag);
}

/* configure(eager_bytes, may_read, copiers, spin_ns): see unisono.h */
static PyObject *group_configure(PyObject *object, PyObject *arguments) {
    Group *self = (Group *)object;
    long long eager_bytes, spin_ns;
    int may_read, copiers;
    if (!PyArg_ParseTuple(arguments, "LpiL", &eager_bytes, &may_read, &copiers, &spin_ns))
        return NULL;
    if (self->group) un_group_configure(self->group, eager_bytes, may_read, copiers, spin_ns);
    Py_RETURN_NONE;
}

/* read_note(rank, kind, about): the text of a note, or None */
static PyObject *group_read_note(PyObject *object, PyObject *arguments) {
    Group *self = (Group *)object;
    int rank, kind;
    unsigned long long about;
    char text[UN_TEXT_BYTES];
    if (!PyArg_ParseTuple(arguments, "iiK", &rank, &kind, &about)) return NULL;
    if (!self->group || rank < 0 || rank >= self->ranks || kind < 0 || kind >= UN_NOTES ||
        !un_group_read_note(self->group, rank, (un_note)kind, about, text))
        Py_RETURN_NONE;
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

/* introduce(name, global_rank, keeps_sites) */
static PyObject *group_introduce(PyObject *object, PyObject *arguments) {
    Group *self = (Group *)object;
    PyObject *name;
    int global_rank, keeps_sites;
    if (!PyArg_ParseTuple(arguments, "Uip", &name, &global_rank, &keeps_sites)) return NULL;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    if (!text) return NULL;
    if (self->group) un_group_introduce(self->group, text, global_rank);
    PyObject *old = self->name;
    self->name = Py_NewRef(name);
    Py_XDECREF(old);
    self->keeps_sites = keeps_sites;
    Py_RETURN_NONE;
}

/* count_step(): this thread begins its next step */
static PyObject *count_step(PyObject *module, PyObject *ignored) {
    (void)module, (void)ignored;
    un_count_step();
    Py_RETURN_NONE;
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
        return PyErr_Format(PyExc_ValueError, "this segment is not the one that was announced");
    Group *self = (Group *)PyType_GenericAlloc(type, 0);
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
    forget_operators_of((Group *)object);
    if (((Group *)object)->users) return; /* an operator of another thread, as Python ends */
    close_now((Group *)object);
    Py_XDECREF(((Group *)object)->name);
    free_object(object);
}

static PyMethodDef group_methods[] = {
    {"run_given", (PyCFunction)(void (*)(void))group_run_given, METH_FASTCALL, NULL},
    {"exchange", (PyCFunction)(void (*)(void))group_exchange, METH_FASTCALL, NULL},
    {"gather_ragged", (PyCFunction)(void (*)(void))group_gather_ragged, METH_FASTCALL, NULL},
    {"all_reduce", (PyCFunction)(void (*)(void))group_all_reduce, METH_FASTCALL, NULL},
    {"run", (PyCFunction)(void (*)(void))group_run, METH_FASTCALL, NULL},
    {"submit", (PyCFunction)(void (*)(void))group_submit, METH_FASTCALL, NULL},
    {"send", (PyCFunction)(void (*)(void))group_send, METH_FASTCALL, NULL},
    {"recv", (PyCFunction)(void (*)(void))group_recv, METH_FASTCALL, NULL},
    {"isend", (PyCFunction)(void (*)(void))group_isend, METH_FASTCALL, NULL},
    {"irecv", (PyCFunction)(void (*)(void))group_irecv, METH_FASTCALL, NULL},
    {"unmatched", group_unmatched, METH_O, NULL},
    {"configure", group_configure, METH_VARARGS, NULL},
    {"barrier", group_barrier, METH_NOARGS, NULL},
    {"refuse", group_refuse, METH_O, NULL},
    {"abort", group_abort, METH_O, NULL},
    {"decide", group_decide, METH_VARARGS, NULL},
    {"write_note", group_write_note, METH_VARARGS, NULL},
    {"owner", group_owner, METH_O, NULL},
    {"read_note", group_read_note, METH_VARARGS, NULL},
    {"introduce", group_introduce, METH_VARARGS, NULL},
    {"watch", group_watch, METH_VARARGS, NULL},
    {"set_flags", group_set_flags, METH_O, NULL},
    {"open_block", group_open_block, METH_VARARGS, NULL},
    {"reopen_block", group_reopen_block, METH_O, NULL},
    {"record_open", (PyCFunction)(void (*)(void))group_record_open, METH_FASTCALL, NULL},
    {"record_given", (PyCFunction)(void (*)(void))group_record_given, METH_FASTCALL, NULL},
    {"record_cover", group_record_cover, METH_O, NULL},
    {"record_end", (PyCFunction)(void (*)(void))group_record_end, METH_FASTCALL, NULL},
    {"check", (PyCFunction)(void (*)(void))group_check, METH_FASTCALL, NULL},
    {"release_works", group_release_works, METH_NOARGS, NULL},
    {"span", group_span, METH_VARARGS, NULL},
    {"meet", group_meet, METH_VARARGS, NULL},
    {"lose", group_lose, METH_VARARGS, NULL},
    {"leave", group_leave, METH_O, NULL},
    {"finish", group_finish, METH_NOARGS, NULL},
    {"serve_operators", group_serve_operators, METH_O, NULL},
    {"close", group_close, METH_NOARGS, NULL},
    {"failure", group_failure, METH_NOARGS, NULL},
    {"state", group_state, METH_VARARGS, NULL},
    {0},
};

static PyMemberDef group_members[] = {
    {"timeout_ns", T_LONGLONG, offsetof(Group, timeout_ns), 0, NULL},
    {"is_reproducible", T_BOOL, offsetof(Group, is_reproducible), 0, NULL},
    {0},
};

static PyType_Slot group_slots[] = {
    {Py_tp_doc, "A membership in a group: Group(descriptor, rank, ranks, nonce, timeout_ns)."},
    {Py_tp_new, (void *)group_new},
    {Py_tp_dealloc, (void *)group_free},
    {Py_tp_methods, group_methods},
    {Py_tp_members, group_members},
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

/* now(): (ticks, nanoseconds) */
static PyObject *now_by_both_clocks(PyObject *module, PyObject *ignored) {
    (void)module, (void)ignored;
    un_moment now = un_now();
    return Py_BuildValue("KK", (unsigned long long)now.ticks, (unsigned long long)now.ns);
}

/* records_layout(ranks): sizes and offsets, in the order of un_layout_of_records. */
static PyObject *records_layout(PyObject *module, PyObject *ranks) {
    (void)module;
    long number = PyLong_AsLong(ranks);
    if (PyErr_Occurred()) return NULL;
    un_layout_of_records layout = un_records_layout((int)number);
    int64_t integers[sizeof layout / sizeof(size_t)];
    memcpy(integers, &layout, sizeof layout);
    return as_tuple(integers, sizeof layout / sizeof(size_t));
}

static PyMethodDef module_methods[] = {
    {"know_torch", module_know_torch, METH_VARARGS, NULL},
    {"describe_shapes", module_describe_shapes, METH_O, NULL},
    {"prepare_sites", module_prepare_sites, METH_VARARGS, NULL},
    {"site_of", module_site_of, METH_O, NULL},
    {"form", module_form, METH_VARARGS, NULL},
    {"find_clash", module_find_clash, METH_VARARGS, NULL},
    {"overlaps_itself", module_overlaps_itself, METH_O, NULL},
    {"now", now_by_both_clocks, METH_NOARGS, NULL},
    {"count_step", count_step, METH_NOARGS, NULL},
    {"compare_shapes", module_compare_shapes, METH_O, NULL},
    {"keep_sites", module_keep_sites, METH_O, NULL},
    {"hold_aborts", module_hold_aborts, METH_O, NULL},
    {"records_layout", records_layout, METH_O, NULL},
    {"create_segment", create_segment, METH_VARARGS, NULL},
    {"create_block", module_create_block, METH_O, NULL},
    {"copy_row", module_copy_row, METH_VARARGS, NULL},
    {"pack_changes", module_pack_changes, METH_VARARGS, NULL},
    {"apply_changes", module_apply_changes, METH_VARARGS, NULL},
    {"share_pages", module_share_pages, METH_VARARGS, NULL},
    {"protect_pages", module_protect_pages, METH_VARARGS, NULL},
    {"load_operators", module_load_operators, METH_O, NULL},
    {"take_interruption", module_take_interruption, METH_NOARGS, NULL},
    {"forget_operators", module_forget_operators, METH_O, NULL},
    {"cpu_quota", cpu_quota, METH_NOARGS, NULL},
    {"memory_room", memory_room, METH_NOARGS, NULL},
    {"load_ucx", module_load_ucx, METH_O, NULL},
    {"open_network", module_open_network, METH_O, NULL},
    {"close_network", module_close_network, METH_NOARGS, NULL},
    {0},
};

static int fill_module(PyObject *module) {
    PyObject *type = PyType_FromSpec(&group_spec);
    if (!type || PyModule_AddObjectRef(module, "Group", type)) return -1;
    Py_DECREF(type);
    if (prepare_calls() || prepare_given() || prepare_blocks() || prepare_works(module) ||
        prepare_messages(module))
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
