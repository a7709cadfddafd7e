/* Arguments whose tensors share memory: what works in place, and what is refused. */
#ifndef UNISONO_OVERLAPS_H
#define UNISONO_OVERLAPS_H

#include "tensors.h"

static inline bool is_wide_input(un_operation o) {
    return o == UN_REDUCE_SCATTER || o == UN_SCATTER || o == UN_ALL_TO_ALL;
}

static inline bool is_wide_output(un_operation o) {
    return o == UN_ALL_GATHER || o == UN_GATHER || o == UN_ALL_TO_ALL || o == UN_ALLOCATE;
}

/* Both sides of a call, for the question whether its tensors share memory as they may.
 * Returns 0, or -1 with a Python exception. */
typedef struct sides {
    un_operation operation;
    size_t rank, ranks;
    bool wide_input, wide_output;
    bool coalesced;
    bool in_place; /* there is no output but the input */
    const side *in, *out;
} sides;
int check_overlaps(const sides *s);

/* check_types_apart(tensors, written): raises ValueError if two tensors of different types share
 * memory, at least one of which is among the first `written`. */
PyObject *module_check_types_apart(PyObject *module, PyObject *arguments);

/* check_overlaps(operation, output, input, rank, ranks, coalesced): raises ValueError; each side is
 * a tensor or a list, and without an input, which is None, a list. */
PyObject *module_check_overlaps(PyObject *module, PyObject *arguments);
PyObject *module_overlaps_itself(PyObject *module, PyObject *tensor);

#endif
