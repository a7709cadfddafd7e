/* The deaths of peers. */
#ifndef UNISONO_WATCHER_H
#define UNISONO_WATCHER_H

#include "group.h"

void stop_watching(un_group *g);
void watch_alone(un_group *g); /* for those who ask where we are: none of its ranks may be here */
void forget_watching_after_fork(void);
int pid_of_peer(const un_group *g, int rank); /* as /proc has it; 0: there is none */
bool peer_lives(const un_group *g, int rank); /* by what the kernel says now */
bool peer_is_dead(const un_group *g, int rank, int64_t *ending);

#endif
