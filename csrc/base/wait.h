/* Waiting: spin, yield, sleep; and waking sleepers. */
#ifndef UNISONO_WAIT_H
#define UNISONO_WAIT_H

#include "base/group.h"

typedef struct patience { /* how long one call still waits, and what it does meanwhile */
    const un_call *call;
    int64_t deadline_ns; /* 0: no clock read yet */
    bool blocked;        /* the caller knows that we wait */
    bool asked;          /* the missing ranks have been asked where they are */
    bool may_leave;      /* if the caller is interrupted, another thread continues from here */
    bool may_finish;     /* no longer, but the rest will soon be over */
    int64_t leaves_ns;   /* the caller was interrupted, and waits until then at most */
} patience;

void start_spinning(spinning *s);
int64_t begin_spin(un_group *g, spinning *s, int peer); /* how long; -1: no peer in particular */
void end_spin(const un_group *g, spinning *s, bool paid_off);
void note_core(un_group *g); /* before we sleep */
void prepare_to_block(patience *p);
/* Whether to keep waiting for `peer`: the group works, there is time, the caller agrees. */
un_status look_after(un_group *g, patience *p, int peer);
un_status await_slowly(un_group *g, int peer, const flag_t *flag, uint64_t target, patience *p);

/* Wait until a peer's flag has reached `target`. The acquire pairs with the release in publish:
 * what the peer wrote before it published is visible afterwards. */
static inline un_status await_flag(un_group *g, int peer, const flag_t *flag, uint64_t target,
                                   patience *p) {
    for (int spins = 0; spins < 16; spins++)
        if (atomic_load_explicit(flag, memory_order_acquire) >= target) return UN_OK;
    return await_slowly(g, peer, flag, target, p);
}

/* Raise one of our own flags. Sequentially consistent on purpose: the store must not pass the
 * load of `sleepers`, or a peer that falls asleep in between is never woken (await_slowly does
 * the same two steps in the other order). */
static inline void publish(un_group *g, flag_t *flag, uint64_t value) {
    atomic_store_explicit(flag, value, memory_order_seq_cst);
    if (atomic_load_explicit(&control_of(g, g->rank)->sleepers, memory_order_seq_cst))
        wake(flag, OF_RANKS, INT_MAX);
}

#endif
