/* Large calls over hosts: rows of bytes, what moves them, and the pipeline of their chunks.
 *
 * lanes      what a call reads and writes, and which operation that is
 * moves      all_gather, broadcast, all_to_all, gather, scatter
 * sums       all_reduce, reduce, reduce_scatter
 * pipeline   chunks go through stages; calls inside a host
 * data       transfers from memory to memory
 */
#ifndef UNISONO_LANES_H
#define UNISONO_LANES_H

#include "hosts/hosts.h"

enum {
    LANE_BYTES = 512 * 1024, /* of a chunk, for each lane */
    ROW_BYTES = 256 * 1024,  /* of each rank's row in a chunk */
    DEPTH = 5,               /* chunks of a stage whose data is in flight, */
    AHEAD = DEPTH - 1,       /* before the first of them is needed */
    STAGES = 3,
};

typedef struct row {
    char *data;
    size_t bytes;
} row;

typedef struct flight flight; /* a transfer, see data.c */

typedef struct lane_call {
    execution *x;
    un_group *g;
    hosts *hosts;
    const host *here;
    un_call inner;                          /* what its calls inside the host have in common */
    const row *given;                       /* the input, one row or one for each rank */
    flight *flights[STAGES * DEPTH], **now; /* by stage and chunk; those of the present ones */
    /* Whose rows each rank of this host passes to the others, by its index: its own, then those
     * that it receives; ranks[begin[index]] and following. */
    int ranks[UN_MAX_RANKS], begin[UN_MAX_RANKS + 1];
} lane_call;

/* pipeline.c */
typedef struct lane_stage {
    un_status (*run)(void *operation, size_t chunk);
    size_t behind; /* so many chunks after the first stage */
} lane_stage;

/* Run all stages of all chunks. A stage begins a chunk once what the stage before has sent and
 * received for it has landed. A failed call returns only once nothing uses its memory any more. */
un_status run_pipeline(lane_call *l, void *operation, size_t chunks, const lane_stage *stages,
                       int count);

typedef struct streams { /* of the ranks of our host, by index */
    un_stream stream[UN_MAX_RANKS];
    un_view views[UN_MAX_RANKS];
    size_t used;
    int begun;
} streams;
static inline void no_streams(streams *s) { s->used = 0, s->begun = 0; }
void add_row(streams *s, int index, row part); /* to the last one, or a new one */
un_status run_inside(lane_call *l, un_operation operation, int root, const un_stream *input,
                     const un_stream *output);
char *scratch(lane_call *l, int which, size_t bytes);
row slice_of(row whole, size_t chunk, size_t bytes);
size_t chunks_of(size_t bytes, size_t chunk);

/* moves.c */
void send_rows(lane_call *l, const row *rows, size_t chunk, size_t bytes);
un_status share_rows(lane_call *l, const row *rows, size_t chunk, size_t bytes);
un_status gather_rows(lane_call *l, const row *rows);
un_status move_pairs(lane_call *l, const row *gives, const row *takes);
un_status run_chain(lane_call *l, row whole, int root);

/* sums.c */
un_status reduce_tensor(lane_call *l, const char *in, char *out, size_t bytes, int root);
un_status reduce_rows(lane_call *l, row to);

/* data.c */
void give(lane_call *l, int peer, row data);
void want(lane_call *l, int peer, row to);
un_status land(lane_call *l, flight **flights);
void end_flights(lane_call *l); /* wait until their memory is unused */

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

#endif
