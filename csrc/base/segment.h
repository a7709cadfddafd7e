/* The segment: mapping it, and allocating its parts on first use. */
#ifndef UNISONO_SEGMENT_H
#define UNISONO_SEGMENT_H

#include "base/group.h"

size_t control_bytes_for(int ranks);
un_status segment_map(un_group *g, int descriptor, uint64_t nonce);
un_status segment_share(un_group *g, const un_group *other);
void segment_unmap(un_group *g);
un_status prepare_slice(un_group *g);           /* this rank's data area, on first use */
un_status prepare_channel(un_group *g, int to); /* its channel to a rank, on first use */
un_status prepare_fifo(un_group *g, int to);    /* its FIFO to a rank, on first use */

int nameless_file(size_t bytes);
int allocate(int descriptor, size_t offset, size_t bytes);
bool allocate_if_room(un_group *g, int descriptor, size_t offset, size_t bytes);

#endif
