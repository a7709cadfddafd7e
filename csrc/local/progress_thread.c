/* The progress thread: one thread per group that advances messages which no thread waits for. */
#include "local/messages.h"

enum { LONGER_NAPS = 5 };

static const int64_t CLOSING_NS = 10 * (int64_t)1000000000; /* for eager sends at the end */

bool look_for_progress(un_group *g) {
    pthread_mutex_lock(&g->messages.lock);
    bool moved = progress(g);
    pthread_mutex_unlock(&g->messages.lock);
    return moved;
}

enum { BOTH_NS = 1000 * 1000 }; /* where messages may come from our own host and from others */

/* Whether messages may come from other hosts, and from our own. */
static void look_at_sources(un_group *g, bool *elsewhere, bool *here) {
    pthread_mutex_lock(&g->messages.lock);
    for (const un_message *m = g->messages.oldest; m; m = m->next) {
        bool is_any = m->source < 0, is_far = !is_any && is_elsewhere(g, m->source);
        *elsewhere |= is_any || is_far;
        *here |= is_any || !is_far;
    }
    pthread_mutex_unlock(&g->messages.lock);
}

/* Sleep until a peer rings, unless something has moved since we last looked. */
void sleep_at_doorbell(un_group *g, int64_t ns) {
    bool elsewhere = false, here = false;
    if (g->reach) look_at_sources(g, &elsewhere, &here);
    if (elsewhere) {
        uint32_t seen = g->reach->rounds();
        if (!look_for_progress(g)) g->reach->sleep(seen, here && ns > BOTH_NS ? BOTH_NS : ns);
        return;
    }
    control *mine = control_of(g, g->rank);
    atomic_fetch_add_explicit(&mine->listeners, 1, memory_order_seq_cst);
    uint32_t seen = atomic_load_explicit(&mine->doorbell, memory_order_seq_cst);
    if (!look_for_progress(g)) sleep_on(&mine->doorbell, OF_RANKS, seen, ns);
    atomic_fetch_sub_explicit(&mine->listeners, 1, memory_order_relaxed);
}

/* Wait until needed. A message that a thread waits for advances without us, and faster. */
static void park(un_group *g) {
    atomic_store(&g->progress_thread.parked, 1);
    pthread_mutex_lock(&g->messages.lock);
    bool needed = g->messages.oldest != NULL;
    pthread_mutex_unlock(&g->messages.lock);
    if (!needed && !atomic_load(&g->progress_thread.stops))
        sleep_on(&g->progress_thread.parked, OF_PROCESS, 1, 1000000000);
    atomic_store(&g->progress_thread.parked, 0);
}

/* Advance messages that no thread waits for. A program that waits for its messages moves them
 * faster than we could, and would wake us for nothing: meanwhile we only nap, and longer the
 * less there is to do, since others may need the core. */
static void *run_progress_thread(void *argument) {
    un_group *g = argument;
    uint32_t waits = 0;
    bool rung = false;
    for (int quiet = 0; !atomic_load(&g->progress_thread.stops);) {
        if (!rung) sleep_ns(NAP_NS_LEAST << quiet);
        uint32_t waits_now = atomic_load_explicit(&g->messages.waits, memory_order_relaxed);
        bool awaited = waits != waits_now;
        waits = waits_now;
        bool idle, moved;
        do {
            pthread_mutex_lock(&g->messages.lock);
            awaited |= g->messages.waiters != 0;
            idle = !g->messages.oldest;
            moved = !idle && !g->messages.waiters && progress(g);
            pthread_mutex_unlock(&g->messages.lock);
            if (moved) quiet = -1;
        } while (moved);
        rung = false;
        if (quiet < LONGER_NAPS) {
            quiet++;
        } else if (idle && !awaited) {
            park(g);
            quiet = 0;
        } else if (!awaited) {
            sleep_at_doorbell(g, SLICE_NS);
            rung = true;
        }
    }
    return NULL;
}

void wake_progress_thread(un_group *g) {
    if (atomic_exchange(&g->progress_thread.parked, 0))
        wake(&g->progress_thread.parked, OF_PROCESS, 1);
}

bool start_progress_thread(un_group *g) {
    if (atomic_load_explicit(&g->progress_thread.has_thread, memory_order_acquire)) return true;
    pthread_mutex_lock(&g->messages.lock);
    if (!g->progress_thread.has_thread)
        g->progress_thread.has_thread = start_thread(&g->progress_thread.thread, "unisono:p2p",
                                                     run_progress_thread, g);
    pthread_mutex_unlock(&g->messages.lock);
    return g->progress_thread.has_thread;
}

void look_at_messages(un_group *g, unfinished *left) {
    pthread_mutex_lock(&g->messages.lock);
    if (g->messages.oldest) progress(g);
    for (const un_message *m = g->messages.oldest; m; m = m->next) {
        if (m->is_copy) continue; /* see deliver_copies */
        bool matched = m->phase > WANTED;
        left->any = true;
        left->moving |= matched;
        left->moved = left->moved * 31 + m->moved + 1;
        for (int rank = 0; rank < g->ranks; rank++)
            left->missing[rank] |= !matched && (m->peer < 0 ? rank != g->rank : rank == m->peer);
    }
    pthread_mutex_unlock(&g->messages.lock);
}

/* Eager sends have returned to their callers: give them some time to arrive. */
static void deliver_copies(un_group *g) {
    for (int64_t end = clock_ns() + CLOSING_NS; clock_ns() < end; sleep_ns(NAP_NS_LEAST)) {
        pthread_mutex_lock(&g->messages.lock);
        progress(g);
        bool only_copies = g->messages.oldest != NULL;
        for (const un_message *m = g->messages.oldest; m; m = m->next) only_copies &= m->is_copy;
        pthread_mutex_unlock(&g->messages.lock);
        if (!only_copies) return;
    }
}

/* The group closes: end all messages, then the progress thread. */
void stop_progress_thread(un_group *g) {
    deliver_copies(g);
    pthread_mutex_lock(&g->messages.lock);
    end_if_unfinished(g, g->messages.oldest);
    if (g->messages.oldest) progress(g);
    pthread_mutex_unlock(&g->messages.lock);
    if (!g->progress_thread.has_thread) return;
    atomic_store(&g->progress_thread.stops, 1);
    wake_progress_thread(g);
    ring_bell(g, g->rank);
    pthread_join(g->progress_thread.thread, NULL);
}
