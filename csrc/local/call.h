/* One call under way, and what a collective must provide so that call.c can run it. */
#ifndef UNISONO_CALL_H
#define UNISONO_CALL_H

#include "base/kernels.h"
#include "base/records.h"
#include "base/tree.h"
#include "base/wait.h"

typedef struct execution execution;
typedef void stage(execution *x, size_t step);

struct execution {
    un_group *g;
    const un_call *call;
    uint64_t number;
    uint64_t record;
    patience patience;

    /* set by plan_execution */
    uint64_t bytes; /* of the tensor, or of the wide side; 0 where each pair has its own size */
    uint64_t hash;  /* of whatever else must be equal */
    size_t descriptor_bytes; /* how much of a peer's descriptor to prefetch */
    size_t payload_bytes;    /* in our own, for other hosts */
    bool takes_lanes;        /* over hosts, and more than fits into a descriptor */
    bool needs_slice;
    bool large;            /* the output is too big to stay in the cache */
    bool has_copiers;      /* other threads take part */
    bool fills_new_memory; /* pages must be allocated first */
    size_t steps;
    size_t piece; /* bytes of each part that one step moves */
    size_t pitch; /* bytes from one part to the next within a slot */
    reducer reducer;
    bool takes_tree;              /* contributions are combined in the order of tree.c */
    struct contributing *several; /* of ranks, see contributions.c; NULL: one of each */
    stage *bring;                 /* our piece into our slot */
    stage *combine;               /* our share of all slots into our slot; NULL: no such stage */
    stage *take;                  /* all slots into our output */
    bool (*pairs_agree)(execution *x); /* for parts of different sizes; may be NULL */
    void (*learn)(execution *x);       /* what only the meeting shows; may be NULL */
    size_t slices;      /* of a compiled schedule: how many times it runs, see schedules.c */
    bool may_be_direct; /* large enough; equal on all ranks if all contribute alike */
    uint32_t marks;     /* whether peers can read our input in place, see direct.c */
};

static inline int me(const execution *x) { return x->g->rank; }

typedef struct span {
    size_t offset, bytes;
} span;

/* Rank `rank`'s share of a span when all ranks work on it together: whole units of so many bytes. */
static inline span share_of_rank(const execution *x, int rank, size_t bytes, size_t unit) {
    size_t ranks = (size_t)x->g->ranks, each = round_up((bytes + ranks - 1) / ranks, unit);
    size_t offset = each * (size_t)rank < bytes ? each * (size_t)rank : bytes;
    return (span){offset, bytes - offset < each ? bytes - offset : each};
}

void do_nothing(execution *x, size_t step); /* a stage */

/* Marks in a posted signature, in the bits of a refusal: peers can read this rank's input in
 * place; some of it lies outside blocks. */
enum { READABLE = 1 << 23, IN_PROCESS = 1 << 22, MARKS = READABLE | IN_PROCESS };

/* With the call lock: run a work's call; waits use the callbacks and timeout of `hooks`. If they
 * interrupt it before its data moves and it `may_leave`, returns UN_NOT_YET: it can be resumed. */
un_status run_work(un_group *g, un_work *work, const un_call *hooks, bool may_leave);

/* With the call lock, and nothing submitted before: post a short call, from which peers need
 * nothing more. False: it is not short, nothing has happened. need_not_wait: it can finish at
 * once. */
bool begin_work(un_group *g, un_work *work);
bool need_not_wait(const un_group *g);

/* If planning succeeded: copy in, post, meet, and read from the descriptors; else refuse. */
un_status post_and_meet(execution *x, un_status planned);

/* ragged.c: the call of an un_ragged. */
un_status gather_ragged(execution *x);

/* The bytes that this rank sends, or receives if it sends nothing. */
uint64_t bytes_of(const un_group *g, const un_call *call);
uint64_t open_call_record(un_group *g, const un_call *call, uint64_t number,
                          enum record_state state);

/* schedules.c: all_reduce or broadcast by a schedule that the caller passes. */
un_status plan_schedule(execution *x);
un_status run_schedule(execution *x);

/* contributions.c: reductions to which ranks bring any number of contributions. */
typedef struct contributing contributing;
void plan_contributions(execution *x);
un_status run_contributions(execution *x);
tree_table *tree_of(execution *x); /* of all ranks, after the meeting */

/* Reduce those of ours that make a node of ours: elements from `item` on of a part of the tensor. */
void reduce_contributions(contributing *c, const un_stream *part, size_t node, size_t item,
                          size_t items, char *to, int stages);

/* Combine one contribution from each rank, in rank order or as a tree. */
static inline void combine_sources(const execution *x, void *to, const void **sources,
                                   size_t bytes) {
    if (!x->takes_tree) {
        x->reducer.run(to, sources, x->g->ranks, bytes / x->reducer.unit, x->call->factor);
        return;
    }
    uint32_t ranks = (uint32_t)x->g->ranks;
    tree_sum t = tree_sum_of(x->call->dtype, x->call->reduction, x->call->factor, ranks);
    reduce_nodes(&t, NULL, ranks, ranks, to, sources, bytes / t.item_bytes, BEGINS | ENDS);
}

/* direct.c: calls in which peers read the senders' memory. UN_REFUSED: the kernel forbids it. */
void plan_direct(execution *x);
bool is_giver(const execution *x, int rank);
un_status run_direct(execution *x);

/* What a rank sends to itself: bytes [offset, +bytes). */
void copy_own(execution *x, const un_stream *to, const un_stream *from, size_t offset,
              size_t bytes);

/* Choose stages, sizes and steps for x->call, from this rank's arguments alone. */
un_status plan_execution(execution *x);

/* call.c: all steps after the meeting; publish that our step is over and, if `waits`, wait for that
 * of all peers. */
un_status move(execution *x);
un_status finish_step(execution *x, bool waits);

#endif
