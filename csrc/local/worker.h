/* The call lock, and asynchronous works. */
#ifndef UNISONO_WORKER_H
#define UNISONO_WORKER_H

#include "base/wait.h"

typedef struct unfinished { /* what is under way when the group closes */
    bool any;
    bool moving;    /* some of it has begun on every member */
    uint64_t moved; /* changes whenever something has moved */
    bool *missing;  /* the ranks that have not begun the rest */
} unfinished;

un_status lock_calls(un_group *g, patience *p);
void unlock_calls(un_group *g);
bool run_queue(un_group *g, const un_work *last, const un_call *hooks, bool may_leave);
void look_at_works(un_group *g, unfinished *left);
void stop_worker(un_group *g);
void end_if_unfinished(un_group *g, bool unfinished); /* membership.c */

#endif
