/* Threads that take part in a large call where cores are idle. */
#ifndef UNISONO_COPIERS_H
#define UNISONO_COPIERS_H

#include "local/call.h"

/* Do [offset, +bytes) of something; pieces of one thing may be done at once, in any order. */
typedef un_status task(const void *what, size_t offset, size_t bytes);

un_status do_with_copiers(un_group *g, size_t bytes, task *run, const void *what);
void stop_copiers(un_group *g); /* the group closes */

/* Not while the program computes, as during a work that no thread waits for: copiers would take
 * memory bandwidth from it. */
static inline bool is_awaited(const execution *x) {
    return x != x->g->worker.begun ||
           atomic_load_explicit(&x->g->worker.waiters, memory_order_relaxed);
}

/* All `bytes` of it; this thread does them alone if the call is not large. */
static inline un_status run_shared(const execution *x, size_t bytes, task *run, const void *what) {
    if (x->has_copiers && bytes >= SHARED_FROM && is_awaited(x))
        return do_with_copiers(x->g, bytes, run, what);
    return run(what, 0, bytes);
}

#endif
