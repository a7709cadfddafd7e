/* Arguments whose tensors share memory: what works in place, and what is refused. */
#ifndef UNISONO_OVERLAPS_H
#define UNISONO_OVERLAPS_H

#include "tensors.h"

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

/* which_overlap(tensors, written): the numbers of two tensors of different types that
 * share memory, the smaller one below `written`; or None. */
PyObject *module_which_overlap(PyObject *module, PyObject *arguments);

#endif
