/* A peer's own memory, read by the kernel. */
#ifndef UNISONO_READING_H
#define UNISONO_READING_H

#include "base/group.h"

void offer_reading(un_group *g); /* the group opens: let peers verify that they read this process */
bool read_peer(un_group *g, int rank, char *to, uint64_t from, size_t bytes); /* false: not all */

static inline void forbid_reading(un_group *g) { write_word(&g->segment.header->unreadable, 1); }

static inline bool may_read_peers(const un_group *g) {
    return !read_word(&g->segment.header->unreadable);
}

#endif
