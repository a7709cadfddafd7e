/* One call under way, and what a collective must provide so that call.c can carry it out. */
#ifndef UNISONO_CALL_H
#define UNISONO_CALL_H

#include "kernels.h"
#include "records.h"
#include "wait.h"

typedef struct execution execution;
typedef void stage(execution *x, size_t step);

struct execution {
    un_group *g;
    const un_call *call;
    uint64_t number;
    uint64_t record;
    patience patience;

    /* set by plan_execution */
    uint64_t bytes; /* of the tensor, or of the wide side; 0 where each pair has its own */
    uint64_t hash;  /* of whatever else must be equal */
    size_t descriptor_bytes; /* how much of a peer's descriptor to fetch ahead */
    size_t payload_bytes; /* in our own, for other hosts */
    bool takes_lanes; /* over hosts, and more than fits into a descriptor */
    bool needs_slice;
    bool large;     /* the output is too big to stay in the cache */
    bool has_copiers; /* other threads take part */
    bool fills_new_memory; /* pages must be made first */
    size_t steps;
    size_t piece;   /* bytes of each part that one step moves */
    size_t pitch;   /* bytes from one part to the next within a slot */
    reducer reducer;
    stage *bring;   /* our piece into our slot */
    stage *combine; /* our share of all slots into our slot; NULL: no such stage */
    stage *take;    /* everybody's slots into our output */
    bool (*pairs_agree)(execution *x); /* for parts of different sizes; may be NULL */
    void (*settle)(execution *x);      /* what is known only after the meeting; may be NULL */
    size_t slices; /* of a compiled schedule: how many times it runs, see schedules.c */
    bool may_be_direct; /* large enough; equal on all ranks, where they bring alike */
    uint32_t marks; /* where what we give lies, if the peers can read it there, see direct.c */
};

/* Marks in a posted signature, where a refusal would be: what this rank gives lies where its peers can read
 * it, and not in blocks alone. */
enum { READABLE = 1 << 23, IN_PROCESS = 1 << 22, MARKS = READABLE | IN_PROCESS };

/* Run a work's call, with the call lock; waiting is done by the hooks and timeout of `hooks`. If
 * they interrupt it before its data moves, and it `may_leave`, it is UN_NOT_YET over, and begun. */
un_status run_work(un_group *g, un_work *work, const un_call *hooks, bool may_leave);

/* With the call lock, and nothing submitted before: post a short call, of which peers need nothing
 * more. False: it is not short, and nothing has happened. Then, whether it can go on at once. */
bool begin_work(un_group *g, un_work *work);
bool need_not_wait(const un_group *g);

/* If planning went well, bring, post, meet, and take what came in the descriptors; else refuse. */
un_status post_and_meet(execution *x, un_status planned);

/* ragged.c: the call of a un_ragged. */
un_status gather_ragged(execution *x);

/* The bytes that this rank gives, or takes where it gives nothing. */
uint64_t bytes_of(const un_group *g, const un_call *call);
uint64_t open_call_record(un_group *g, const un_call *call, uint64_t number,
                          enum record_state state);

/* schedules.c: all_reduce or broadcast by a schedule that the caller passes. */
un_status plan_schedule(execution *x);
un_status run_schedule(execution *x);

/* direct.c: calls in which the peers read the givers' memory. UN_REFUSED: the kernel refuses it. */
void plan_direct(execution *x);
bool is_giver(const execution *x, int rank);
un_status run_direct(execution *x);

/* What a rank gives to itself: bytes [offset, +bytes). */
void copy_own(execution *x, const un_stream *to, const un_stream *from, size_t offset,
              size_t bytes);

/* Choose stages, sizes and steps for x->call. Looks at this rank's arguments alone. */
un_status plan_execution(execution *x);

/* call.c: say that our next step is over and, if we must, wait until that of all others is. */
un_status finish_step(execution *x, bool waits);

#endif
