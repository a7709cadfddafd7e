/* Copiers: threads of a group that take pieces of what a large call copies, reads or combines.
 *
 * One core can neither fill the machine's memory bus nor clear the pages of new memory fast
 * enough. Where a rank has spare cores, the thread with the call lock offers its work in pieces,
 * takes pieces itself, and waits for those that others took. No thread waits for a copier to
 * wake up: one that comes late finds nothing left. */
#define _GNU_SOURCE
#include <sched.h>

#include "local/copiers.h"
#include "base/wait.h"

enum { COUNT_BITS = 16, COUNT_MASK = (1 << COUNT_BITS) - 1, SPINS_BEFORE_YIELD = 4096 };

/* The offer: its number, how many pieces it has, and which is next. A thread that raises the
 * last one by compare-and-swap owns a piece of that very offer, which cannot end without it. */
static uint64_t offer_of(uint64_t number, size_t pieces) {
    return number << 2 * COUNT_BITS | (uint64_t)pieces << COUNT_BITS;
}

/* Take a piece and do it; false: none is left. */
static bool do_piece(un_group *g) {
    uint64_t offer = atomic_load_explicit(&g->copiers.offer, memory_order_acquire);
    do {
        if ((offer & COUNT_MASK) == (offer >> COUNT_BITS & COUNT_MASK)) return false;
    } while (!atomic_compare_exchange_weak_explicit(&g->copiers.offer, &offer, offer + 1,
                                                    memory_order_acq_rel, memory_order_acquire));
    size_t offset = (offer & COUNT_MASK) * g->copiers.step;
    size_t left = g->copiers.bytes - offset;
    un_status status = atomic_load_explicit(&g->copiers.status, memory_order_relaxed);
    if (!status)
        status = g->copiers.run(g->copiers.what, offset,
                                left < g->copiers.step ? left : g->copiers.step);
    if (status) atomic_store_explicit(&g->copiers.status, status, memory_order_relaxed);
    atomic_fetch_add_explicit(&g->copiers.done, 1, memory_order_release);
    return true;
}

static void *run_copier(void *argument) {
    un_group *g = argument;
    while (!atomic_load(&g->copiers.stopping)) {
        uint32_t seen = atomic_load(&g->copiers.bell);
        for (int64_t last = clock_ns(); clock_ns() - last < COPIER_SPIN_NS;) {
            if (do_piece(g))
                last = clock_ns();
            else
                relax_cpu();
        }
        atomic_store(&g->copiers.asleep, 1);
        if (!atomic_load(&g->copiers.stopping))
            sleep_on(&g->copiers.bell, OF_PROCESS, seen, 1000000000);
    }
    return NULL;
}

static void call_copiers(un_group *g) {
    while (g->copiers.running < g->copiers.wanted &&
           start_thread(&g->copiers.threads[g->copiers.running], "unisono:copier", run_copier, g))
        g->copiers.running++;
    g->copiers.wanted = g->copiers.running; /* threads are scarce: do not ask again */
    if (!atomic_exchange(&g->copiers.asleep, 0)) return;
    atomic_fetch_add(&g->copiers.bell, 1);
    wake(&g->copiers.bell, OF_PROCESS, INT_MAX);
}

un_status do_with_copiers(un_group *g, size_t bytes, task *run, const void *what) {
    size_t step = round_up(bytes / (4 * (size_t)(g->copiers.wanted + 1)), PAGE_BYTES);
    if (step < SHARED_LEAST) step = SHARED_LEAST;
    size_t pieces = (bytes + step - 1) / step;
    g->copiers.run = run;
    g->copiers.what = what;
    g->copiers.bytes = bytes;
    g->copiers.step = step;
    atomic_store_explicit(&g->copiers.status, UN_OK, memory_order_relaxed);
    atomic_store_explicit(&g->copiers.done, 0, memory_order_relaxed);
    atomic_store(&g->copiers.offer, offer_of(++g->copiers.offers, pieces));
    call_copiers(g);
    while (do_piece(g)) continue;
    for (int spins = 0; atomic_load_explicit(&g->copiers.done, memory_order_acquire) < pieces;
         spins++)
        spins < SPINS_BEFORE_YIELD ? relax_cpu() : (void)sched_yield();
    return atomic_load_explicit(&g->copiers.status, memory_order_relaxed);
}

void stop_copiers(un_group *g) {
    atomic_store(&g->copiers.stopping, 1);
    atomic_fetch_add(&g->copiers.bell, 1);
    wake(&g->copiers.bell, OF_PROCESS, INT_MAX);
    while (g->copiers.running) pthread_join(g->copiers.threads[--g->copiers.running], NULL);
}
