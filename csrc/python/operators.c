/* Groups for torch's operators, whose bodies (torch_ops/operators.c) run without the GIL. */
#include "binding.h"
#include "torch_ops/operators.h"

static PyObject *interruption; /* what a signal's handler raised during an operator */

/* Handle signals while an operator waits. */
static int pause_operator(void *ignored) {
    (void)ignored;
    PyGILState_STATE state = PyGILState_Ensure();
    int failed = PyErr_CheckSignals();
    if (failed) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyErr_NormalizeException(&type, &value, &traceback);
        PyObject *before = interruption;
        interruption = value;
        Py_XDECREF(before);
        Py_XDECREF(type);
        Py_XDECREF(traceback);
    }
    PyGILState_Release(state);
    return failed;
}

static void note_site(void *owner) {
    PyGILState_STATE state = PyGILState_Ensure();
    un_group *group = ((Group *)owner)->group;
    if (group) write_site_note(group, un_group_calls(group));
    PyGILState_Release(state);
}

static void end_use_by_operators(void *owner) {
    PyGILState_STATE state = PyGILState_Ensure();
    end_use(owner, NULL);
    PyGILState_Release(state);
}

/* load_operators(path): None, or what torch lacks */
PyObject *module_load_operators(PyObject *module, PyObject *path) {
    (void)module;
    const char *text = PyUnicode_AsUTF8AndSize(path, NULL);
    if (!text) return NULL;
    const char *missing = operators_load(
        text, &(operator_hooks){
                  .pause = pause_operator, .fail = note_site, .end_use = end_use_by_operators});
    if (!missing) Py_RETURN_NONE;
    return PyUnicode_FromString(missing);
}

/* take_interruption(): the exception that a signal's handler raised during an operator, or None */
PyObject *module_take_interruption(PyObject *module, PyObject *ignored) {
    (void)module, (void)ignored;
    PyObject *taken = interruption;
    interruption = NULL;
    return taken ? taken : Py_NewRef(Py_None);
}

/* Operators find it no longer. The table was a user of the group. */
static void forget(void *owner, const char *name) {
    if (operators_forget(&owner, name) == FORGOTTEN) end_use(owner, NULL);
}

void forget_operators_of(Group *self) { forget(self, ""); }

/* forget_operators(name): of the group of this name, if it is known */
PyObject *module_forget_operators(PyObject *module, PyObject *name) {
    (void)module;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    if (!text) return NULL;
    forget(NULL, text);
    Py_RETURN_NONE;
}

/* serve_operators(name): let operators find this group */
PyObject *group_serve_operators(PyObject *object, PyObject *name) {
    Group *self = (Group *)object;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    if (!text) return NULL;
    if (!self->group || self->closing || self->keeps_sites) Py_RETURN_NONE;
    forget_operators_of(self);
    const operator_group known = {
        self->group, self->rank, self->ranks, &self->timeout_ns, &self->is_reproducible, self};
    if (!operators_know(text, &known)) return PyErr_NoMemory();
    self->users++;
    Py_RETURN_NONE;
}
