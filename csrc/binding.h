/* What the files of the Python module share: the Group, and how a call leaves Python. */
#ifndef UNISONO_BINDING_H
#define UNISONO_BINDING_H

#include "tensors.h"

typedef struct Group {
    PyObject_HEAD
    un_group *group; /* NULL once closed */
    int ranks;
    int rank;
    int users; /* calls under way, counted under the GIL */
    bool closing;
    bool keeps_sites; /* of blocking calls too */
    int64_t timeout_ns;
    struct Work *pending; /* works under way, oldest first */
} Group;

/* calls.c */
void release_gil(void *parked);
int handle_signals(void *parked);
void tell_site(un_group *group, uint64_t about);
void close_now(Group *self);
int read_call(un_call *call, bool *coalesced, PyObject *const *arguments, Py_ssize_t count);
int read_arguments(Group *self, un_call *call, PyObject *output, PyObject *input, bool coalesced,
                   side *in, side *out);
PyObject *group_all_reduce(PyObject *object, PyObject *const *arguments, Py_ssize_t count);
PyObject *group_run(PyObject *object, PyObject *const *arguments, Py_ssize_t count);
PyObject *group_barrier(PyObject *object, PyObject *ignored);
PyObject *group_refuse(PyObject *object, PyObject *operation);
int prepare_calls(void);

/* sites.c */
const un_site *current_site(void);
PyObject *module_site_of(PyObject *module, PyObject *frame);
PyObject *module_prepare_sites(PyObject *module, PyObject *arguments);

/* works.c */
void reap(Group *self);
PyObject *group_submit(PyObject *object, PyObject *const *arguments, Py_ssize_t count);
PyObject *group_message(PyObject *object, PyObject *const *arguments, Py_ssize_t count);
int prepare_works(void);

#endif
