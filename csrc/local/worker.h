/* The call lock, and asynchronous works. */
#ifndef UNISONO_WORKER_H
#define UNISONO_WORKER_H

#include "base/wait.h"

un_status lock_calls(un_group *g, patience *p);
void unlock_calls(un_group *g);
bool run_queue(un_group *g, const un_work *last, const un_call *hooks, bool may_leave);
void look_at_works(un_group *g, unfinished *left);
void stop_worker(un_group *g);

#endif
