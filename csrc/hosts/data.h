/* Data that goes between hosts in a large call, from memory to memory. */
#ifndef UNISONO_HOST_DATA_H
#define UNISONO_HOST_DATA_H

#include "hosts/hosts.h"

typedef struct row {
    char *data;
    size_t bytes;
} row;

typedef struct lane_call {
    execution *x;
    un_group *g;
    hosts *hosts;
    un_call inner;    /* what its calls inside the host have in common */
    const row *given; /* the input, one row or one for each rank */
} lane_call;

typedef struct batch { /* transfers that are waited for together */
    struct flight *first;
} batch;

void give(lane_call *l, batch *b, int peer, const void *data, size_t bytes);
void want(lane_call *l, batch *b, int peer, void *to, size_t bytes);
un_status land(lane_call *l, batch *b);
void end_batch(lane_call *l, batch *b); /* the call has failed: wait until its memory is unused */

#endif
