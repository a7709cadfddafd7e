/* Functions whose calls of the wrong form (too many arguments, an unknown name) are answered by us.
 *
 * Python checks the form before a function runs, so the function cannot tell its peers. A decorator
 * in Python would cost a call of a microsecond a fifth; this one costs 70 to 100 ns. */
#include "binding.h"

#include <structmember.h>

/* Exported by every CPython from 3.9 on, and part of the limited API from 3.12 on. */
PyObject *PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);
PyObject *PyVectorcall_Call(PyObject *, PyObject *, PyObject *);
enum { HAS_VECTORCALL = 1 << 11, IS_METHOD = 1 << 17 };   /* likewise Py_TPFLAGS_... */
#define IS_OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1)) /* and PY_VECTORCALL_ARGUMENTS_OFFSET */

typedef struct Form {
    PyObject_HEAD
    PyObject *(*call)(PyObject *, PyObject *const *, size_t, PyObject *);
    PyObject *function, *answer, *attributes; /* for good: a form belongs to a module or class */
    Py_ssize_t most;                          /* arguments without a name */
} Form;

/* An exception that has no traceback was raised before the function began. */
static PyObject *call_form(PyObject *object, PyObject *const *given, size_t count,
                           PyObject *names) {
    Form *self = (Form *)object;
    if ((Py_ssize_t)(count & ~IS_OFFSET) > self->most)
        return PyObject_Vectorcall(self->answer, given, count, names);
    PyObject *result = PyObject_Vectorcall(self->function, given, count, names);
    if (result || !PyErr_ExceptionMatches(PyExc_TypeError)) return result;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (traceback) {
        PyErr_Restore(type, error, traceback);
        return NULL;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    return PyObject_Vectorcall(self->answer, given, count, names);
}

static PyObject *method_type; /* types.MethodType */

static PyObject *bind_form(PyObject *form, PyObject *object, PyObject *type) {
    (void)type;
    return object ? PyObject_CallFunctionObjArgs(method_type, form, object, NULL) : Py_NewRef(form);
}

/* Pickled by its name, as a function is. */
static PyObject *reduce_form(PyObject *form, PyObject *ignored) {
    (void)ignored;
    return PyObject_GetAttrString(form, "__qualname__");
}

static PyMethodDef methods[] = {{"__reduce__", reduce_form, METH_NOARGS, NULL}, {0}};
static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Form, call), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(Form, attributes), READONLY, NULL},
    {0},
};
static PyGetSetDef properties[] = {{"__dict__", PyObject_GenericGetDict, NULL, NULL, NULL}, {0}};
static PyType_Slot slots[] = {{Py_tp_call, (void *)PyVectorcall_Call},
                              {Py_tp_descr_get, (void *)bind_form},
                              {Py_tp_members, members},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, properties},
                              {0, NULL}};
static PyType_Spec spec = {.name = "unisono._native.Form",
                           .basicsize = sizeof(Form),
                           .flags = Py_TPFLAGS_DEFAULT | HAS_VECTORCALL | IS_METHOD,
                           .slots = slots};

/* form(function, answer, MethodType, most): the function; a call of the wrong form, or with more arguments
 * without a name, is one of `answer` */
PyObject *module_form(PyObject *module, PyObject *arguments) {
    (void)module;
    static PyObject *form_type;
    PyObject *function, *answer;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(arguments, "OOOn", &function, &answer, &method_type, &most)) return NULL;
    if (!form_type && !(form_type = PyType_FromSpec(&spec))) return NULL;
    Form *form = PyObject_New(Form, (PyTypeObject *)form_type);
    if (!form) return NULL;
    form->call = call_form;
    form->function = Py_NewRef(function);
    form->answer = Py_NewRef(answer);
    form->attributes = NULL;
    form->most = most;
    return (PyObject *)form;
}
