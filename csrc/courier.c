/* The courier: a thread of a group that carries messages which nobody waits for. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "messages.h"

enum {
    NAP_NS = 100 * 1000,
    NAPS = 20, /* without a wait, or anything to do, before we sleep */
};

static const int64_t CLOSING_NS = 10 * (int64_t)1000000000; /* for eager sends at the end */

bool look_for_progress(un_group *g) {
    pthread_mutex_lock(&g->message_lock);
    bool moved = progress(g);
    pthread_mutex_unlock(&g->message_lock);
    return moved;
}

/* Sleep until a peer rings; not if something has moved since we last looked. */
void listen_at_door(un_group *g, int64_t ns) {
    control *mine = control_of(g, g->rank);
    struct timespec slice = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    atomic_fetch_add_explicit(&mine->listeners, 1, memory_order_seq_cst);
    uint32_t seen = atomic_load_explicit(&mine->doorbell, memory_order_seq_cst);
    if (!look_for_progress(g))
        syscall(SYS_futex, &mine->doorbell, FUTEX_WAIT, seen, &slice, NULL, 0);
    atomic_fetch_sub_explicit(&mine->listeners, 1, memory_order_relaxed);
}

static void sleep_ns(int64_t ns) {
    struct timespec moment = {.tv_nsec = ns};
    nanosleep(&moment, NULL);
}

/* Wait to be needed. A message that somebody waits for goes on without us, and faster. */
static void park(un_group *g) {
    atomic_store(&g->courier_parked, 1);
    pthread_mutex_lock(&g->message_lock);
    bool needed = g->messages != NULL;
    pthread_mutex_unlock(&g->message_lock);
    struct timespec slice = {.tv_sec = 1};
    if (!needed && !atomic_load(&g->courier_stops))
        syscall(SYS_futex, &g->courier_parked, FUTEX_WAIT_PRIVATE, 1, &slice, NULL, 0);
    atomic_store(&g->courier_parked, 0);
}

/* Keep messages going that nobody waits for. A program that waits for its messages moves them
 * faster than we could, and would have to wake us for nothing: while it does, we only nap. */
static void *carry(void *argument) {
    un_group *g = argument;
    uint32_t waits = 0;
    bool moved = false;
    for (int naps = 0; !atomic_load(&g->courier_stops); naps++) {
        if (!moved) sleep_ns(NAP_NS);
        uint32_t waits_now = atomic_load_explicit(&g->waits, memory_order_relaxed);
        if (waits != waits_now) naps = 0;
        waits = waits_now;
        pthread_mutex_lock(&g->message_lock);
        bool idle = !g->messages;
        moved = !idle && !g->waiters && progress(g);
        pthread_mutex_unlock(&g->message_lock);
        if (moved) naps = 0;
        if (naps < NAPS) continue;
        if (idle)
            park(g);
        else if (!g->waiters)
            listen_at_door(g, SLICE_NS);
    }
    return NULL;
}

void call_courier(un_group *g) {
    if (atomic_exchange(&g->courier_parked, 0))
        syscall(SYS_futex, &g->courier_parked, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

bool start_courier(un_group *g) {
    if (atomic_load_explicit(&g->has_courier, memory_order_acquire)) return true;
    pthread_mutex_lock(&g->message_lock);
    if (!g->has_courier) g->has_courier = start_thread(&g->courier, carry, g);
    pthread_mutex_unlock(&g->message_lock);
    return g->has_courier;
}

/* Eager sends are over for their senders: give them some time to arrive. */
static void deliver_copies(un_group *g) {
    for (int64_t end = clock_ns() + CLOSING_NS; clock_ns() < end; sleep_ns(NAP_NS)) {
        pthread_mutex_lock(&g->message_lock);
        progress(g);
        bool only_copies = g->messages != NULL;
        for (const un_message *m = g->messages; m; m = m->next) only_copies &= m->is_copy;
        pthread_mutex_unlock(&g->message_lock);
        if (!only_copies) return;
    }
}

/* The group closes: what is under way ends, and the courier with it. */
void stop_courier(un_group *g) {
    deliver_copies(g);
    pthread_mutex_lock(&g->message_lock);
    if (g->messages) {
        abort_group(g, UN_ABORTED, g->rank, g->calls);
        progress(g);
    }
    pthread_mutex_unlock(&g->message_lock);
    if (!g->has_courier) return;
    atomic_store(&g->courier_stops, 1);
    call_courier(g);
    ring_bell(g, g->rank);
    pthread_join(g->courier, NULL);
}
