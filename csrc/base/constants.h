/* The engine's tuning constants: the sizes of pieces, the thresholds between algorithms, and how
 * long a rank spins before it sleeps. All members of a group must have the same ones, as all builds
 * of one layout version do.
 *
 * "N1" gives the cost of half and twice the value (or other factors, if named) on 2 ranks of a
 * Neoverse N1 with 2 cores, by benchmarks/constants.py: minimum times on a busy machine. */
#ifndef UNISONO_CONSTANTS_H
#define UNISONO_CONSTANTS_H

#include <stdbool.h>
#include <stddef.h>

enum {
/* The most that one step moves of a part: slots and their source stay in the L2 cache: 1 MiB
     * on Neoverse N1, 2 MiB on Sapphire Rapids. N1, all_gather: 1 to 8% and -6 to 7%. */
#if defined(__x86_64__)
    STEP_BYTES = 128 * 1024,
#else
    STEP_BYTES = 64 * 1024,
#endif
    /* The most that lies in a descriptor. Over hosts a second message costs more than the copies:
     * there up to the second size, if the ranks of a host then send at most the third. */
    DESCRIBED_MOST = 1504,
    DESCRIBED_OVER_HOSTS = 4096,
    DESCRIBED_BY_HOST = 16 * 1024,
    CUT_STEP_BYTES = 128 * 1024, /* every rank combines its share. N1: 8 to 11% and -3 to 1% */
    /* all_reduce and reduce: from here on the second meeting of "cut", in which each rank
     * combines its share, costs less than combining everything. N1: 8% at 16 KiB; four times: 5%
     * at 64 KiB. */
    CUT_FROM = 32 * 1024,
    /* From here on reading a peer's memory, and waiting until it was read, costs less than
     * copying through slots (benchmarks/shared.py). */
    DIRECT_FROM = 4 * 1024,
    CROWDED_FROM = 64 * 1024, /* N1, 4 ranks: four times costs 26% at 64 KiB */
    /* The kernel reads parts of ordinary tensors in this range. Below: system calls cost more
     * than a second copy within the cache. Above: both are bound by memory. */
    READ_FROM = 64 * 1024,
    READ_CROWDED_FROM = 256 * 1024, /* all_to_all alone */
    READ_MOST = 4 * 1024 * 1024,
    READING_RANKS = 4, /* of an all_gather; with more, slots that all read from one cache win */
    READ_AT_ONCE = 1024 * 1024,    /* between two checks of the abort word */
    BYPASS_FROM = 8 * 1024 * 1024, /* outputs are written around the cache. N1: no difference */
    COPIED_BYTES = 16 * 1024, /* combined, then copied to slots and other outputs from the nearest
                               * cache: storing to both at once takes a quarter longer on x86.
                               * N1: 4 to 5% and 0 to 3% */
    COPIED_AT_ONCE = 256 * 1024, /* of a block, between two checks of the abort word */
    BOUNCE_BYTES = 4096,         /* through the stack, where user memory is not contiguous */
    COPIERS_FROM = 1024 * 1024,  /* a rank's copiers, if any, take part, */
    SHARED_FROM = 32 * 1024,     /* in every step of the call that moves so much, */
    SHARED_LEAST = 16 * 1024,    /* by pieces of at least so much */
    COPIERS_MOST = 3,
    RESTING_BYTES = 256 * 1024, /* of a work that may be left to the thread that waits for it */
};

/* Where cores are few, waiting costs more, and both begin at CROWDED_FROM. */
static inline size_t cut_from(int ranks, bool crowded) {
    return crowded ? CROWDED_FROM : CUT_FROM / (size_t)(ranks == 2 ? 1 : ranks);
}

static inline size_t direct_from(bool crowded) { return crowded ? CROWDED_FROM : DIRECT_FROM; }

/* Threads besides the one that makes a call: half of a rank's cores stay with the program. */
static inline int copiers_for(int ranks, int cores) {
    int spare = cores / ranks / 2 - 1;
    return spare < 0 ? 0 : spare < COPIERS_MOST ? spare : COPIERS_MOST;
}

enum {
    GLANCES = 64, /* about 1 us, before we tell the caller that we wait. N1: no difference */
    SPIN_NS_MOST = 200 * 1000, /* N1, a tenth and twice: 1% if peers come; disturbed.py */
    SPIN_NS_LEAST = 2 * 1000,
    TRIAL_NS = 50 * 1000,     /* longer than a sleeper takes to wake up and answer */
    TRIAL_EVERY = 32,         /* so that trials which fail cost little; */
    YIELD_EVERY = 512,        /* yielding to others may cost a time slice of each */
    LATE_NS = 1000 * 1000,    /* a yield that took so long has cost one */
    IDLE_SPIN_NS = 20 * 1000, /* a program that submits one work submits another */
    WAIT_SPIN_NS = 50 * 1000,
    COPIER_SPIN_NS = 100 * 1000, /* between two steps of a call */
    NAP_NS_LEAST = 100 * 1000,   /* each further one is twice as long as the one before */
    SLICE_NS = 50 * 1000 * 1000, /* the longest sleep between two checks */
    ASK_NS = 800 * 1000 * 1000,  /* before the deadline: time for an answer */
};

#endif
