/* The engine's collectives as torch's operators (unisono::all_reduce_ and its kin) on CPU tensors.
 *
 * Python defines the operators (unisono.operators); here are their bodies, which torch calls without
 * the GIL. A body runs a call on contiguous tensors of a group that it knows by name. All else goes
 * to the operator unisono::go_on, which is Python: other tensors, other groups, and failures. */
#ifndef UNISONO_TORCH_OPERATORS_H
#define UNISONO_TORCH_OPERATORS_H

#include "unisono.h"

typedef struct operator_hooks {
    int (*pause)(void *);         /* as un_call's, in a thread without the GIL */
    void (*fail)(void *owner);    /* a call has failed: tell the peers where the program is */
    void (*end_use)(void *owner); /* the last call has left a group that was forgotten meanwhile */
} operator_hooks;

/* Register the bodies with the torch whose library lies at this path. NULL, or what it lacks. */
const char *operators_load(const char *path, const operator_hooks *hooks);

typedef struct operator_group {
    un_group *group;
    int rank, ranks;
    const volatile int64_t *timeout_ns;   /* which may change, */
    const volatile char *is_reproducible; /* as may the form of reductions */
    void *owner;
} operator_group;

/* Know a group by this name, until it is forgotten. False: no memory. */
bool operators_know(const char *name, const operator_group *group);

/* Forget the group of this owner; or, if it is NULL, of this name. */
typedef enum forgotten { NOT_KNOWN, FORGOTTEN, STILL_RUNS /* end_use follows */ } forgotten;
forgotten operators_forget(void **owner, const char *name);

#endif
