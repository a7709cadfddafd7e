/* Locks and queues: one thread at a time is in a call, and works that were submitted come first.
 *
 * Whoever has the call lock may run the queue. That is the group's own thread, started with the
 * first work; or a thread that waits for a work which nobody has begun, and saves itself the
 * handing over; or one that makes a blocking call and must not overtake.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "call.h"

enum {
    SLICE_NS = 50 * 1000 * 1000,
    IDLE_SPIN_NS = 20 * 1000, /* a program that submits one work submits another */
    WAIT_SPIN_NS = 50 * 1000,
};

static void sleep_until_changed(_Atomic uint32_t *word, uint32_t seen, int64_t ns) {
    struct timespec slice = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, &slice, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int most) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, most, NULL, NULL, 0);
}

/* -- the call lock: 0 free, 1 taken, 2 taken and somebody waits -------------------------------- */

static bool try_lock_calls(un_group *g) {
    uint32_t none = 0;
    return atomic_compare_exchange_strong_explicit(&g->worker.call_lock, &none, 1,
                                                   memory_order_acquire, memory_order_relaxed);
}

static uintptr_t this_thread(void) { return (uintptr_t)pthread_self(); }

static void note_owner(un_group *g) {
    atomic_store_explicit(&g->worker.owner, this_thread(), memory_order_relaxed);
}

/* A thread that has the lock already (a signal handler that interrupted a call, say) would wait
 * for itself. */
un_status lock_calls(un_group *g, patience *p) {
    if (!try_lock_calls(g)) {
        if (atomic_load(&g->worker.owner) == this_thread()) return UN_REENTERED;
        prepare_to_block(p);
        while (atomic_exchange_explicit(&g->worker.call_lock, 2, memory_order_acquire)) {
            sleep_until_changed(&g->worker.call_lock, 2, SLICE_NS);
            if (p->call->pause && p->call->pause(p->call->argument)) return UN_INTERRUPTED;
        }
    }
    note_owner(g);
    return UN_OK;
}

void unlock_calls(un_group *g) {
    atomic_store_explicit(&g->worker.owner, 0, memory_order_relaxed);
    if (atomic_exchange_explicit(&g->worker.call_lock, 0, memory_order_release) == 2)
        wake(&g->worker.call_lock, 1);
}

/* -- the queue --------------------------------------------------------------------------------- */

static un_work *next_work(un_group *g) {
    pthread_mutex_lock(&g->worker.queue_lock);
    un_work *work = g->worker.first;
    if (work) g->worker.first = work->next;
    pthread_mutex_unlock(&g->worker.queue_lock);
    return work;
}

/* A work's state: 0 under way, 1 done, 2 under way and somebody sleeps until it is. */
enum { UNDER_WAY, DONE, AWAITED };

static void finish(un_group *g, un_work *work, un_status status) {
    work->status = status;
    atomic_fetch_sub(&g->worker.queued, 1);
    /* From the exchange on the work may be gone: only its address is used. */
    if (atomic_exchange(&work->state, DONE) == AWAITED) wake(&work->state, INT_MAX);
}

/* With the call lock: run what was submitted, up to and including `last`; NULL: everything. After
 * `finish` a work may be gone. */
void run_queue(un_group *g, const un_work *last, const un_call *hooks) {
    for (un_work *work; (work = next_work(g));) {
        un_call waiting = *hooks;
        waiting.timeout_ns = work->call.timeout_ns;
        bool enough = work == last;
        finish(g, work, run_work(g, work, &waiting));
        if (enough) return;
    }
}

static bool idle(un_group *g, uint32_t seen) {
    int64_t start = clock_ns();
    while (g->roomy && clock_ns() - start < IDLE_SPIN_NS) {
        if (atomic_load(&g->worker.bell) != seen) return false;
        relax_cpu();
    }
    return true;
}

static void *run_worker(void *argument) {
    un_group *g = argument;
    const un_call no_hooks = {0};
    for (;;) {
        uint32_t seen = atomic_load(&g->worker.bell);
        if (atomic_load(&g->worker.queued)) {
            patience p = {.call = &no_hooks};
            lock_calls(g, &p);
            run_queue(g, NULL, &no_hooks);
            unlock_calls(g);
        } else if (atomic_load(&g->worker.stopping)) {
            return NULL;
        } else if (idle(g, seen)) {
            atomic_store(&g->worker.asleep, 1);
            if (atomic_load(&g->worker.bell) == seen)
                sleep_until_changed(&g->worker.bell, seen, 1000000000);
            atomic_store(&g->worker.asleep, 0);
        }
    }
}

static void wake_worker(un_group *g) {
    atomic_fetch_add(&g->worker.bell, 1);
    if (atomic_load(&g->worker.asleep)) wake(&g->worker.bell, 1);
}

static bool start_worker(un_group *g) {
    if (!g->worker.has_thread)
        g->worker.has_thread = start_thread(&g->worker.thread, run_worker, g);
    return g->worker.has_thread;
}

un_status un_submit(un_group *g, un_work *work) {
    if (group_is_inherited(g)) return UN_FORKED;
    atomic_store(&work->state, UNDER_WAY);
    work->next = NULL;
    work->call.block = NULL;
    work->call.pause = NULL;
    work->record = open_call_record(g, &work->call, 0, QUEUED);
    pthread_mutex_lock(&g->worker.queue_lock);
    bool started = start_worker(g);
    if (started) {
        if (g->worker.first)
            g->worker.last->next = work;
        else
            g->worker.first = work;
        g->worker.last = work;
        atomic_fetch_add(&g->worker.queued, 1);
    }
    pthread_mutex_unlock(&g->worker.queue_lock);
    if (!started) return UN_SYSTEM;
    wake_worker(g);
    return UN_OK;
}

bool un_work_done(const un_work *work) {
    return atomic_load_explicit(&work->state, memory_order_acquire) == DONE;
}

un_status un_work_wait(un_group *g, un_work *work, const un_call *hooks) {
    if (group_is_inherited(g)) return un_work_done(work) ? work->status : UN_FORKED;
    bool forever = hooks->timeout_ns < 0;
    patience p = {.call = hooks};
    if (forever && !un_work_done(work) && try_lock_calls(g)) {
        note_owner(g);
        prepare_to_block(&p);
        run_queue(g, work, hooks);
        unlock_calls(g);
    }
    if (un_work_done(work)) return work->status;
    prepare_to_block(&p);
    int64_t start = clock_ns();
    while (g->roomy && clock_ns() - start < WAIT_SPIN_NS) {
        if (un_work_done(work)) return work->status;
        relax_cpu();
    }
    while (!un_work_done(work)) {
        int64_t left_ns = forever ? SLICE_NS : start + hooks->timeout_ns - clock_ns();
        if (left_ns <= 0) return UN_NOT_YET;
        uint32_t seen = UNDER_WAY;
        atomic_compare_exchange_strong(&work->state, &seen, AWAITED);
        if (seen != DONE)
            sleep_until_changed(&work->state, AWAITED, left_ns < SLICE_NS ? left_ns : SLICE_NS);
        if (!un_work_done(work) && hooks->pause && hooks->pause(hooks->argument)) {
            abort_group(g, UN_INTERRUPTED, g->rank, g->calls.latest);
            return UN_INTERRUPTED;
        }
    }
    return work->status;
}

/* The group closes: nothing may be under way any more when its memory goes. */
void stop_worker(un_group *g) {
    if (!g->worker.has_thread) return;
    if (atomic_load(&g->worker.queued)) abort_group(g, UN_ABORTED, g->rank, g->calls.latest);
    atomic_store(&g->worker.stopping, 1);
    wake_worker(g);
    pthread_join(g->worker.thread, NULL);
}
