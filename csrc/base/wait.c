/* Waiting: spin for a moment, yield the core where cores are few, then sleep on a futex. */
#define _GNU_SOURCE
#include <sched.h>

#include "base/records.h"
#include "base/wait.h"

enum {
    FINISH_NS = 1000 * 1000 * 1000, /* for a work whose data moves, after an interrupt */
    PEEK_NS = 200 * 1000, /* between two polls of the network, while we sleep on a local flag */
};

static bool reached(const flag_t *flag, uint64_t target) {
    return atomic_load_explicit(flag, memory_order_acquire) >= target;
}

/* Whether waiting for `peer` has become pointless. */
static un_status look_around(un_group *g, int peer, const flag_t *flag, uint64_t target) {
    if (atomic_load_explicit(&g->segment.header->abort, memory_order_acquire))
        return fail_from_abort(g);
    if (atomic_load_explicit(&control_of(g, peer)->closed, memory_order_acquire) &&
        !reached(flag, target))
        return fail(g, UN_PEER_CLOSED, peer);
    return UN_OK;
}

void note_core(un_group *g) {
    atomic_store_explicit(&control_of(g, g->rank)->core, (uint32_t)sched_getcpu() + 1,
                          memory_order_relaxed);
}

/* Ranks that wake each other up may end up on one core, though others are idle: there each can
 * only run while the other sleeps, and nothing tells the kernel to separate them. So the higher
 * rank moves to another core that it may run on; the kernel is free to move it again. */
static void part_from(un_group *g, int peer) {
    uint32_t core = (uint32_t)sched_getcpu();
    cpu_set_t all, others;
    if (g->rank < peer || sched_getaffinity(0, sizeof(all), &all)) return;
    if (atomic_load_explicit(&control_of(g, peer)->core, memory_order_relaxed) != core + 1) return;
    others = all;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) && !sched_setaffinity(0, sizeof(others), &others))
        sched_setaffinity(0, sizeof(all), &all);
}

/* How long to spin for `peer`: as long as has paid off lately, and occasionally longer: ranks that
 * only ever wake each other up would never find out that the core they gave up is free again.
 *
 * Where cores are few we yield instead. A thread that yields runs last: if those before it
 * compute, or belong to other programs, it returns late, even if its flag was set long ago. A
 * sleeper is woken at once. So we yield only where recent yields returned soon; 0: not at all. */
int64_t begin_spin(un_group *g, spinning *s, int peer) {
    s->is_trial = s->ns < TRIAL_NS && ++s->short_ones > s->before_trial;
    if (s->is_trial) {
        s->short_ones = 0;
        if (peer >= 0 && !g->crowded) part_from(g, peer);
        return TRIAL_NS;
    }
    return g->crowded && s->ns <= SPIN_NS_LEAST ? 0 : s->ns;
}

void end_spin(const un_group *g, spinning *s, bool paid_off) {
    if (!paid_off && s->ns > SPIN_NS_LEAST) s->ns /= 2;
    if (paid_off && s->ns < s->most_ns) s->ns = s->is_trial ? TRIAL_NS : 2 * s->ns;
    if (!s->is_trial) return;
    s->before_trial = paid_off || !g->crowded ? TRIAL_EVERY : 2 * s->before_trial;
    if (s->before_trial > YIELD_EVERY) s->before_trial = YIELD_EVERY;
}

void start_spinning(spinning *s) {
    *s = (spinning){.ns = SPIN_NS_MOST / 2, .most_ns = SPIN_NS_MOST, .before_trial = TRIAL_EVERY};
}

void un_group_set_spin(un_group *g, int64_t most_ns) {
    if (!g->crowded) g->spin.ns = g->spin.most_ns = most_ns;
}

/* True once the flag is set. */
static bool spin(un_group *g, int peer, const flag_t *flag, uint64_t target) {
    int64_t start = clock_ns(), budget_ns = begin_spin(g, &g->spin, peer);
    do {
        if (g->poll) g->poll();
        for (int spins = 0; spins < 32; spins++) {
            if (reached(flag, target)) {
                end_spin(g, &g->spin, true);
                return true;
            }
            relax_cpu();
        }
    } while (clock_ns() - start < budget_ns);
    end_spin(g, &g->spin, false);
    return false;
}

/* The same where cores are few, or hosts may share them. */
static bool yield(un_group *g, int peer, const flag_t *flag, uint64_t target) {
    int64_t start = clock_ns(), budget_ns = begin_spin(g, &g->spin, peer);
    if (!budget_ns) return false;
    int64_t last = start, longest_ns = 0;
    bool there = false, in_time = true;
    while (!there && in_time &&
           !atomic_load_explicit(&g->segment.header->abort, memory_order_relaxed)) {
        if (g->poll) g->poll();
        there = reached(flag, target);
        if (!there) sched_yield();
        there = there || reached(flag, target);
        int64_t now = clock_ns();
        in_time = now - start < budget_ns;
        longest_ns = now - last > longest_ns ? now - last : longest_ns;
        last = now;
    }
    if (longest_ns > LATE_NS || there) end_spin(g, &g->spin, longest_ns <= LATE_NS);
    return there;
}

void prepare_to_block(patience *p) {
    if (!p->blocked && p->call->block) p->call->block(p->call->argument);
    p->blocked = true;
}

/* The deadline is near: ask the ranks that have not arrived, or are behind us, where they are,
 * for the error text. */
static void ask_missing(un_group *g, patience *p) {
    p->asked = true;
    uint64_t progress = read_word(&control_of(g, g->rank)->progress);
    for (int rank = 0; rank < g->ranks; rank++)
        if (!reached(&descriptor_of(g, rank, g->calls.latest)->call, g->calls.latest) ||
            !reached(&control_of(g, rank)->progress, progress))
            ask_where(g, rank, g->calls.latest);
}

/* UN_OK: keep waiting. After an interrupt the caller's program must not be asked again. */
static un_status ask_caller(un_group *g, patience *p) {
    if (!p->leaves_ns) {
        if (!p->call->pause || !p->call->pause(p->call->argument)) return UN_OK;
        p->leaves_ns = clock_ns() + (p->may_finish ? FINISH_NS : 0);
        if (p->may_leave) return UN_NOT_YET;
    }
    return clock_ns() < p->leaves_ns ? UN_OK : interrupt(g, g->calls.latest);
}

/* Sleep until the flag may be set: on its own word or, if this rank receives from that rank,
 * until something arrives on the network. */
static void sleep_for(un_group *g, int peer, const flag_t *flag, uint64_t target, int64_t ns) {
    if (is_heard_here(g, peer)) {
        uint32_t seen = g->reach->rounds();
        g->poll();
        if (!reached(flag, target)) g->reach->sleep(seen, ns);
        return;
    }
    if (g->is_inner) { /* data for us may cross the network meanwhile */
        g->poll();
        ns = ns < PEEK_NS ? ns : PEEK_NS;
    }
    _Atomic uint32_t *sleepers = &control_of(g, peer)->sleepers;
    atomic_fetch_add_explicit(sleepers, 1, memory_order_seq_cst);
    uint64_t seen = atomic_load_explicit(flag, memory_order_seq_cst);
    if (seen < target) sleep_on(flag, OF_RANKS, (uint32_t)seen, ns);
    atomic_fetch_sub_explicit(sleepers, 1, memory_order_relaxed);
}

static un_status await_long(un_group *g, int peer, const flag_t *flag, uint64_t target,
                            patience *p) {
    for (int glances = g->crowded || p->blocked ? 0 : GLANCES; glances; glances--) {
        if (reached(flag, target)) return UN_OK;
        relax_cpu();
    }
    prepare_to_block(p);
    if ((g->crowded ? yield : spin)(g, peer, flag, target)) return UN_OK;

    if (!p->deadline_ns) p->deadline_ns = clock_ns() + p->call->timeout_ns;
    note_core(g);
    while (!reached(flag, target)) {
        un_status status = look_around(g, peer, flag, target);
        if (status) return status;
        int64_t left_ns = p->deadline_ns - clock_ns();
        if (left_ns <= 0) return fail(g, UN_TIMEOUT, peer);
        if (left_ns < ASK_NS && !p->asked) ask_missing(g, p);

        sleep_for(g, peer, flag, target, left_ns < SLICE_NS ? left_ns : SLICE_NS);
        status = reached(flag, target) ? UN_OK : ask_caller(g, p);
        if (status) return status;
    }
    return UN_OK;
}

un_status await_slowly(un_group *g, int peer, const flag_t *flag, uint64_t target, patience *p) {
    if (!g->reach) return await_long(g, peer, flag, target, p);
    g->reach->attend(true);
    un_status status = await_long(g, peer, flag, target, p);
    g->reach->attend(false);
    return status;
}

un_status look_after(un_group *g, patience *p, int peer) {
    if (atomic_load_explicit(&g->segment.header->abort, memory_order_acquire))
        return fail_from_abort(g);
    int64_t now = clock_ns();
    if (!p->deadline_ns) p->deadline_ns = now + p->call->timeout_ns;
    if (now >= p->deadline_ns) return fail(g, UN_TIMEOUT, peer);
    if (p->deadline_ns - now < ASK_NS && !p->asked) ask_missing(g, p);
    return ask_caller(g, p);
}
