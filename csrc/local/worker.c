/* Locks and queues: one thread at a time is in a call, and submitted works come first.
 *
 * A thread with the call lock may run the queue: the group's own thread, started with the first
 * work; a thread that waits for a work which no other has begun, and so avoids a handover; or one
 * that makes a blocking call and must not overtake.
 *
 * A short call with nothing before it in the queue is posted by the thread that submits it, and
 * completed if all peers have posted. If not, it may rest: its peers need nothing more, most
 * programs soon wait for it, and a thread that woke up for it would only disturb them. The group's
 * thread looks at it after a nap or two. Where that thread has no core of its own, this also holds
 * for longer calls, up to those that take about as long as waking it up.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "local/call.h"
#include "local/worker.h"

enum { LONGER_NAPS = 3 };

enum { AWAKE, NAPS, SLEEPS }; /* the group's thread; from a nap it wakes up by itself */

/* -- the call lock: 0 free, 1 taken, 2 taken with waiters -------------------------------------- */

static bool try_lock_calls(un_group *g) {
    uint32_t none = 0;
    return atomic_compare_exchange_strong_explicit(&g->worker.call_lock, &none, 1,
                                                   memory_order_acquire, memory_order_relaxed);
}

static uintptr_t this_thread(void) { return (uintptr_t)pthread_self(); }

static void note_owner(un_group *g) {
    atomic_store_explicit(&g->worker.owner, this_thread(), memory_order_relaxed);
}

/* A thread that already has the lock (a signal handler that interrupted a call, say) would wait
 * for itself. */
un_status lock_calls(un_group *g, patience *p) {
    if (!try_lock_calls(g)) {
        if (atomic_load(&g->worker.owner) == this_thread()) return UN_REENTERED;
        prepare_to_block(p);
        while (atomic_exchange_explicit(&g->worker.call_lock, 2, memory_order_acquire)) {
            sleep_on(&g->worker.call_lock, OF_PROCESS, 2, SLICE_NS);
            if (p->call->pause && p->call->pause(p->call->argument)) return UN_INTERRUPTED;
        }
    }
    note_owner(g);
    return UN_OK;
}

void unlock_calls(un_group *g) {
    atomic_store_explicit(&g->worker.owner, 0, memory_order_relaxed);
    if (atomic_exchange_explicit(&g->worker.call_lock, 0, memory_order_release) == 2)
        wake(&g->worker.call_lock, OF_PROCESS, 1);
}

/* -- the queue --------------------------------------------------------------------------------- */

static un_work *next_work(un_group *g) {
    pthread_mutex_lock(&g->worker.queue_lock);
    un_work *work = g->worker.first;
    if (work) g->worker.first = work->next;
    pthread_mutex_unlock(&g->worker.queue_lock);
    return work;
}

/* A work's state: 0 under way, 1 done, 2 under way with sleeping waiters. */
enum { UNDER_WAY, DONE, AWAITED };

static void finish(un_group *g, un_work *work, un_status status) {
    work->status = status;
    atomic_store(&g->worker.may_rest, 0);
    atomic_fetch_add_explicit(&g->worker.finished, 1, memory_order_relaxed);
    atomic_fetch_sub(&g->worker.queued, 1);
    /* After the exchange the work may be gone: only its address is used. */
    if (atomic_exchange(&work->state, DONE) == AWAITED) wake(&work->state, OF_PROCESS, INT_MAX);
}

/* A work that has begun continues before all others. */
static void put_back(un_group *g, un_work *work) {
    pthread_mutex_lock(&g->worker.queue_lock);
    work->next = g->worker.first;
    if (!work->next) g->worker.last = work;
    g->worker.first = work;
    pthread_mutex_unlock(&g->worker.queue_lock);
}

/* With the call lock: run submitted works, up to and including `last`; NULL: all. After `finish`
 * a work may be gone. True: the caller was interrupted. */
bool run_queue(un_group *g, const un_work *last, const un_call *hooks, bool may_leave) {
    bool interrupted = false;
    for (un_work *work; !interrupted && (work = next_work(g));) {
        un_call waiting = *hooks;
        waiting.timeout_ns = work->call.timeout_ns;
        bool enough = work == last;
        un_status status = run_work(g, work, &waiting, may_leave);
        interrupted = g->worker.begun->patience.leaves_ns;
        if (status == UN_NOT_YET)
            put_back(g, work);
        else
            finish(g, work, status);
        if (enough) break;
    }
    return interrupted;
}

static bool idle(un_group *g, uint32_t seen) {
    int64_t start = clock_ns();
    while (g->roomy && clock_ns() - start < IDLE_SPIN_NS) {
        if (atomic_load(&g->worker.bell) != seen) return false;
        relax_cpu();
    }
    return true;
}

static const un_call no_hooks = {0};

static void run_all(un_group *g) {
    patience p = {.call = &no_hooks};
    lock_calls(g, &p);
    run_queue(g, NULL, &no_hooks, false);
    unlock_calls(g);
}

/* A submitting thread checks `asleep` after it queued its work; we check the queue after we set
 * it. */
static void sleep_as(un_group *g, uint32_t how, uint32_t seen, int64_t ns) {
    atomic_store(&g->worker.asleep, how);
    if (atomic_load(&g->worker.bell) == seen && (how == NAPS || !atomic_load(&g->worker.queued)))
        sleep_on(&g->worker.bell, OF_PROCESS, seen, ns);
    atomic_store(&g->worker.asleep, AWAKE);
}

static void *run_worker(void *argument) {
    un_group *g = argument;
    int naps = 0;        /* one after the other */
    uint32_t before = 0; /* how many works were finished before the last one */
    for (;;) {
        uint32_t seen = atomic_load(&g->worker.bell);
        uint32_t finished = atomic_load(&g->worker.finished);
        bool goes_on = naps && finished == before; /* nothing happened while we napped */
        if (atomic_load(&g->worker.queued)) {
            if (!atomic_load(&g->worker.may_rest) || goes_on || atomic_load(&g->worker.stopping)) {
                run_all(g);
                naps = 0;
                continue;
            }
        } else if (atomic_load(&g->worker.stopping)) {
            return NULL;
        } else if (!naps || goes_on) {
            if (naps || idle(g, seen)) sleep_as(g, SLEEPS, seen, 1000000000);
            naps = 0;
            continue;
        }
        before = finished;
        sleep_as(g, NAPS, seen, NAP_NS_LEAST << naps);
        if (naps < LONGER_NAPS) naps++;
    }
}

static void ring_worker(un_group *g) {
    atomic_fetch_add(&g->worker.bell, 1);
    if (atomic_load(&g->worker.asleep)) wake(&g->worker.bell, OF_PROCESS, 1);
}

/* Nothing may rest any more. */
static void wake_worker(un_group *g) {
    atomic_store(&g->worker.may_rest, 0);
    ring_worker(g);
}

static bool start_worker(un_group *g, bool with_thread) {
    if (atomic_load_explicit(&g->worker.has_thread, memory_order_acquire)) return true;
    pthread_mutex_lock(&g->worker.queue_lock);
    if (!g->worker.begun) g->worker.begun = calloc(1, sizeof *g->worker.begun);
    if (with_thread && !g->worker.has_thread && g->worker.begun)
        g->worker.has_thread = start_thread(&g->worker.thread, "unisono:worker", run_worker, g);
    pthread_mutex_unlock(&g->worker.queue_lock);
    return with_thread ? g->worker.has_thread : g->worker.begun != NULL;
}

static bool is_resting_size(const un_group *g, const un_work *work) {
    return !g->roomy && bytes_of(g, &work->call) <= RESTING_BYTES;
}

/* One that has begun comes before all others. */
static void enqueue_work(un_group *g, un_work *work) {
    pthread_mutex_lock(&g->worker.queue_lock);
    bool is_alone = !g->worker.first;
    if (work->begun) {
        work->next = g->worker.first;
        g->worker.first = work;
    } else {
        *(is_alone ? &g->worker.first : &g->worker.last->next) = work;
    }
    if (is_alone || !work->begun) g->worker.last = work;
    atomic_store(&g->worker.may_rest, is_alone && (work->begun || is_resting_size(g, work)));
    atomic_fetch_add(&g->worker.queued, 1);
    pthread_mutex_unlock(&g->worker.queue_lock);
}

/* With the call lock: whether the resting work has begun. */
static bool has_begun(un_group *g) {
    pthread_mutex_lock(&g->worker.queue_lock);
    bool begun = g->worker.first && g->worker.first->begun;
    pthread_mutex_unlock(&g->worker.queue_lock);
    return begun;
}

/* With the call lock: finish the resting work, if no peer keeps us waiting. */
static void run_resting(un_group *g) {
    if (atomic_load(&g->worker.may_rest) && has_begun(g) && need_not_wait(g))
        run_queue(g, NULL, &no_hooks, false);
}

/* With the call lock: post a short call, and finish it if possible. True: it is done. */
static bool run_now(un_group *g, un_work *work) {
    run_resting(g);
    if (atomic_load(&g->worker.queued) || !begin_work(g, work) || !need_not_wait(g)) return false;
    un_call alone = {.timeout_ns = work->call.timeout_ns};
    work->status = run_work(g, work, &alone, false);
    atomic_store(&work->state, DONE);
    return true;
}

un_status un_submit(un_group *g, un_work *work) {
    if (group_is_inherited(g)) return UN_FORKED;
    atomic_store(&work->state, UNDER_WAY);
    work->next = NULL;
    work->begun = false;
    work->call.block = NULL;
    work->call.pause = NULL;
    work->record = open_call_record(g, &work->call, 0, QUEUED);
    if (!start_worker(g, g->ranks > 1)) return UN_SYSTEM;
    work->number = atomic_fetch_add(&control_of(g, g->rank)->works, 1) + 1;
    bool locked = try_lock_calls(g);
    if (locked) note_owner(g);
    bool done = locked && run_now(g, work);
    bool is_served = done || start_worker(g, true);
    if (!done && is_served) enqueue_work(g, work);
    if (locked) unlock_calls(g);
    if (done || !is_served) return done ? UN_OK : UN_SYSTEM;
    if (!atomic_load(&g->worker.may_rest))
        wake_worker(g);
    else if (atomic_load(&g->worker.asleep) == SLEEPS)
        ring_worker(g); /* for a nap */
    return UN_OK;
}

bool un_work_done(const un_work *work) {
    return atomic_load_explicit(&work->state, memory_order_acquire) == DONE;
}

bool un_work_test(un_group *g, un_work *work) {
    if (un_work_done(work)) return true;
    if (group_is_inherited(g) || !atomic_load(&g->worker.may_rest) || !try_lock_calls(g))
        return false;
    note_owner(g);
    run_resting(g);
    unlock_calls(g);
    return un_work_done(work);
}

un_status un_work_is_under_way(un_group *g, const un_work *work) {
    if (un_work_done(work)) return UN_OK;
    if (group_is_inherited(g)) return UN_FORKED;
    if (!g->roomy || g->reach || atomic_load(&g->worker.may_rest)) return UN_REFUSED;
    for (int rank = 0; rank < g->ranks; rank++)
        if (read_word(&control_of(g, rank)->works) < work->number) return UN_NOT_YET;
    return UN_OK;
}

static un_status wait_for_work(un_group *g, un_work *work, const un_call *hooks) {
    bool forever = hooks->timeout_ns < 0;
    patience p = {.call = hooks};
    if (forever && !un_work_done(work) && try_lock_calls(g)) {
        note_owner(g);
        if (!work->begun) prepare_to_block(&p);
        bool interrupted = run_queue(g, work, hooks, true);
        unlock_calls(g);
        if (interrupted) wake_worker(g);
        if (interrupted && !un_work_done(work)) return UN_INTERRUPTED;
    }
    if (un_work_done(work)) return work->status;
    prepare_to_block(&p);
    if (atomic_load(&g->worker.may_rest)) wake_worker(g); /* that is what we wait for */
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
            sleep_on(&work->state, OF_PROCESS, AWAITED, left_ns < SLICE_NS ? left_ns : SLICE_NS);
        if (!un_work_done(work) && hooks->pause && hooks->pause(hooks->argument))
            return UN_INTERRUPTED; /* it continues without us */
    }
    return work->status;
}

un_status un_work_wait(un_group *g, un_work *work, const un_call *hooks) {
    if (un_work_done(work)) return work->status;
    if (group_is_inherited(g)) return UN_FORKED;
    atomic_fetch_add_explicit(&g->worker.waiters, 1, memory_order_relaxed);
    un_status status = wait_for_work(g, work, hooks);
    atomic_fetch_sub_explicit(&g->worker.waiters, 1, memory_order_relaxed);
    return status;
}

void look_at_works(un_group *g, unfinished *left) {
    if (!atomic_load(&g->worker.queued)) return;
    if (atomic_load(&g->worker.may_rest)) wake_worker(g);
    uint64_t latest = read_word(&g->calls.latest);
    left->any = left->moving = true;
    left->moved = left->moved * 31 + atomic_load(&g->worker.finished);
    for (int rank = 0; rank < g->ranks; rank++) {
        left->moved = left->moved * 31 + read_word(&control_of(g, rank)->progress);
        left->missing[rank] = read_word(&descriptor_of(g, rank, latest)->call) < latest;
        left->moving &= !left->missing[rank];
    }
}

/* The group closes: nothing may be running when its memory is freed. */
void stop_worker(un_group *g) {
    if (!g->worker.has_thread) return;
    end_if_unfinished(g, atomic_load(&g->worker.queued));
    atomic_store(&g->worker.stopping, 1);
    wake_worker(g);
    pthread_join(g->worker.thread, NULL);
}
