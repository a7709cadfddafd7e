/* The deaths of peers. */
#ifndef UNISONO_WATCHER_H
#define UNISONO_WATCHER_H

#include "base/group.h"

void stop_watching(un_group *g);
void watch_alone(un_group *g); /* to answer peers on other hosts that ask where we are */
int pid_of_peer(const un_group *g, int rank); /* as in /proc; 0: none */
bool peer_lives(const un_group *g, int rank); /* according to the kernel now */
bool peer_is_dead(const un_group *g, int rank, int64_t *ending);

#endif
