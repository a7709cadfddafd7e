/* One call from first step to last: post our descriptor, compare it with the peers', move data.
 *
 * Every rank posts its call (post_call), waits for all descriptors and compares them before any
 * byte of any output changes (meet). Because of that meeting two descriptors and two sets of slots
 * per rank are enough: a rank that is past it knows that all peers have finished the previous call.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "local/call.h"
#include "base/segment.h"
#include "local/messages.h"

enum {
    MISMATCH_GRACE_MS = 1000, /* for late descriptors, so that the error text is complete */
    REFUSAL_GRACE_MS = 2000,  /* for peers to refuse as well, so that the group stays usable */
};

static uint64_t signature_of_call(const un_call *call) {
    unsigned reduction = (unsigned)call->reduction | call->form << UN_FORM_SHIFT;
    return signature_of(call->operation, reduction, call->root, call->dtype);
}

/* The arguments of a refused call are ignored. */
static uint64_t refusal_of(const un_call *call, un_status reason) {
    return (uint64_t)call->operation | (uint64_t)reason << 16;
}

static un_posted read_posted(const un_group *g, int rank, uint64_t call) {
    const descriptor *p = descriptor_of(g, rank, call);
    uint64_t number = atomic_load_explicit(&p->call, memory_order_acquire);
    uint64_t signature = read_word(&p->signature);
    return (un_posted){.call = number,
                       .operation = (un_operation)(signature & 0xff),
                       .reduction = signature >> 8 & 0xff,
                       .refused = (un_status)(signature >> 16 & 0x3f),
                       .root = (int16_t)(signature >> 24 & 0xffff),
                       .dtype = (un_dtype)(signature >> 40),
                       .bytes = read_word(&p->bytes),
                       .hash = read_word(&p->hash)};
}

un_state un_group_state(const un_group *g, int rank, uint64_t call) {
    un_state s = {.calls = g->calls.latest,
                  .reads = read_word(&g->reading.count),
                  .descriptor = g->segment.descriptor};
    if (group_is_inherited(g)) return s;
    const control *c = control_of(g, rank);
    s.has_closed = atomic_load(&c->closed); /* first: closed, then ended */
    s.is_lost = has_lost(g, rank, &s.ending);
    s.progress = read_word(&c->progress);
    s.waiting = read_waiting(g, rank, atomic_load(&c->waiting));
    s.posted = read_posted(g, rank, call);
    s.sizes = sizes_of(g, rank, call);
    return s;
}

/* Upper half: whatever else must be equal; lower half: the hash of the shapes. */
static uint64_t hash_of(const execution *x) {
    uint64_t hash = x->hash * 0x9e3779b97f4a7c15u;
    return (hash & ~(uint64_t)UINT32_MAX) | x->call->shape_mark;
}

static void post_call(execution *x, un_status refusal) {
    un_group *g = x->g;
    descriptor *mine = descriptor_of(g, g->rank, x->number);
    uint64_t signature = signature_of_call(x->call) | x->marks;
    if (refusal) signature = refusal_of(x->call, refusal);
    write_word(&mine->signature, signature);
    write_word(&mine->bytes, refusal ? 0 : x->bytes);
    write_word(&mine->hash, refusal ? 0 : hash_of(x));
    if (g->reach) g->reach->post(x);
    publish(g, &mine->call, x->number);
}

/* Give the others some time to post this call too; returns whether all did. */
static bool wait_for_descriptors(execution *x, int milliseconds) {
    prepare_to_block(&x->patience);
    for (int64_t end = clock_ns() + milliseconds * (int64_t)1000000; clock_ns() < end;) {
        int here = 0;
        for (int rank = 0; rank < x->g->ranks; rank++)
            here += atomic_load(&descriptor_of(x->g, rank, x->number)->call) >= x->number;
        if (here == x->g->ranks) return true;
        if (atomic_load(&x->g->segment.header->abort)) return false;
        if (x->g->poll) x->g->poll();
        sleep_ns(200 * 1000);
    }
    return false;
}

/* Shapes count where both ranks give them. */
static bool same_hash(uint64_t a, uint64_t b) {
    return a == b || (a >> 32 == b >> 32 && (!(uint32_t)a || !(uint32_t)b));
}

static bool same_call(const descriptor *a, const descriptor *b) {
    return !((read_word(&a->signature) ^ read_word(&b->signature)) & ~(uint64_t)MARKS) &&
           read_word(&a->bytes) == read_word(&b->bytes) &&
           same_hash(read_word(&a->hash), read_word(&b->hash));
}

static un_status mismatch(execution *x) {
    wait_for_descriptors(x, MISMATCH_GRACE_MS);
    return fail(x->g, UN_MISMATCH, -1);
}

/* Wait for the descriptors of all peers and compare them with ours; over hosts, only of those
 * whose messages this rank receives (`is_heard`), or only of the others. */
static un_status meet_some(execution *x, bool is_heard) {
    un_group *g = x->g;
    const descriptor *mine = descriptor_of(g, g->rank, x->number);
    for (int step = 1; step < g->ranks; step++) {
        int peer = g->rank + step < g->ranks ? g->rank + step : g->rank + step - g->ranks;
        if (g->reach && is_heard_here(g, peer) != is_heard) continue;
        const descriptor *theirs = descriptor_of(g, peer, x->number);
        un_status status = await_flag(g, peer, &theirs->call, x->number, &x->patience);
        if (status) return status;
        if (!same_call(mine, theirs)) return mismatch(x);
        for (size_t line = 32; line < x->descriptor_bytes; line += LINE_BYTES)
            __builtin_prefetch(theirs->payload + line);
    }
    return UN_OK;
}

/* First what other ranks of our host wait for: they sleep until we receive it. */
static un_status meet(execution *x) {
    un_status status = x->g->reach ? meet_some(x, true) : UN_OK;
    if (!status) status = meet_some(x, false);
    if (status) return status;
    return x->pairs_agree && !x->pairs_agree(x) ? mismatch(x) : UN_OK;
}

un_status finish_step(execution *x, bool waits) {
    un_group *g = x->g;
    uint64_t step = g->calls.steps + 1;
    publish(g, &control_of(g, g->rank)->progress, step);
    for (int peer = 0; waits && peer < g->ranks; peer++) {
        if (peer == g->rank) continue;
        un_status status = await_flag(g, peer, &control_of(g, peer)->progress, step, &x->patience);
        if (status) return status;
    }
    return UN_OK;
}

/* Step by step: copy our piece into our slot, then combine and copy out the pieces of earlier
 * steps, which the others have written meanwhile. A rank publishes that a step is over and waits
 * only for its peers' previous step, so that copying overlaps with waiting.
 *
 * Step t may write slot t % SLOTS: a peer that is past step t-2 has taken piece t-4 (with a
 * combining stage between; t-3 without), and we have waited for that in step t-1. */
un_status move(execution *x) {
    un_group *g = x->g;
    size_t stages = x->combine ? 2 : 1;
    size_t last = x->steps + stages - 1;
    flag_t *progress = &control_of(g, g->rank)->progress;
    for (size_t step = 1; step <= last; step++) {
        if (step < x->steps) x->bring(x, step);
        for (int peer = 0; step > 1 && peer < g->ranks; peer++) {
            if (peer == g->rank) continue;
            un_status status = await_flag(g, peer, &control_of(g, peer)->progress,
                                          g->calls.steps + step - 1, &x->patience);
            if (status) return status;
        }
        if (x->combine && step - 1 < x->steps) x->combine(x, step - 1);
        if (step >= stages) x->take(x, step - stages);
        if (step < last) publish(g, progress, g->calls.steps + step);
    }
    g->calls.steps += last - 1;
    return UN_OK;
}

/* How many senders let peers read their memory: none, all, or some, which then copy it to slots. */
enum { NONE, SOME, ALL };

static int readable_givers(const execution *x) {
    int givers = 0, readable = 0;
    for (int rank = 0; rank < x->g->ranks; rank++) {
        if (!is_giver(x, rank)) continue;
        givers++;
        readable += (read_word(&descriptor_of(x->g, rank, x->number)->signature) & READABLE) != 0;
    }
    return !readable ? NONE : readable == givers ? ALL : SOME;
}

/* What peers could have read in place is copied to slots now, and every rank waits for it. */
static un_status bring_late(execution *x) {
    un_group *g = x->g;
    if (x->marks) x->bring(x, 0);
    un_status status = finish_step(x, true);
    if (!status) g->calls.steps++;
    return status;
}

static un_status refuse(execution *x, un_status reason) {
    un_group *g = x->g;
    post_call(x, reason);
    bool agreed = wait_for_descriptors(x, REFUSAL_GRACE_MS);
    const descriptor *mine = descriptor_of(g, g->rank, x->number);
    for (int rank = 0; agreed && rank < g->ranks; rank++)
        agreed = same_call(mine, descriptor_of(g, rank, x->number));
    if (!agreed) fail(g, UN_MISMATCH, g->rank);
    return reason;
}

static un_status prepare(execution *x) {
    un_status status = plan_execution(x);
    return !status && x->needs_slice ? prepare_slice(x->g) : status;
}

static void bring_and_post(execution *x) {
    if (!x->marks) x->bring(x, 0);
    post_call(x, UN_OK);
}

static un_status meet_and_move(execution *x) {
    un_status status = meet(x);
    if (status) return status;
    x->patience.may_finish = x->patience.may_leave;
    x->patience.may_leave = false;
    if (x->learn) x->learn(x);
    record_start(x->g, x->record);
    if (x->call->form & UN_CONTRIBUTIONS) return run_contributions(x);
    if (x->takes_lanes) return x->g->reach->run(x);
    if (x->call->schedule) return run_schedule(x);
    int readable = x->may_be_direct ? readable_givers(x) : NONE;
    if (readable == ALL && (status = run_direct(x)) != UN_REFUSED) return status;
    if (readable != NONE) status = bring_late(x);
    return status ? status : move(x);
}

static un_status run(execution *x) {
    un_status status = prepare(x);
    if (status) return refuse(x, status);
    bring_and_post(x);
    return meet_and_move(x);
}

/* The meeting of a ragged gather moves nothing: heads lie in the descriptors. */
un_status post_and_meet(execution *x, un_status planned) {
    if (planned) return refuse(x, planned);
    bring_and_post(x);
    un_status status = meet(x);
    if (status) return status;
    record_start(x->g, x->record);
    x->take(x, 0);
    return UN_OK;
}

uint64_t bytes_of(const un_group *g, const un_call *call) {
    bool takes = call->operation == UN_SCATTER && call->root != g->rank;
    const un_stream *side = call->input && !takes ? call->input : call->output;
    bool wide = call->operation == UN_REDUCE_SCATTER || call->operation == UN_ALL_TO_ALL ||
                (call->operation == UN_SCATTER && !takes);
    uint64_t bytes = 0;
    for (int part = 0; side && part < (wide ? g->ranks : 1); part++) bytes += side[part].bytes;
    return bytes;
}

uint64_t open_call_record(un_group *g, const un_call *call, uint64_t number,
                          enum record_state state) {
    if (g->is_inner || g->is_covered) return 0;
    return open_record(g, signature_of_call(call), bytes_of(g, call), number, call->site, state);
}

/* For the peers' error texts: our shape and our line. A rank that knows one knows the other. */
static void write_failure_notes(un_group *g, const un_call *call, uint64_t number) {
    if (call->shape) write_shape_note(g, "", call->shape, number);
    if (call->site) un_group_write_note(g, UN_SITE, number, call->site->text);
}

static un_status end_call(execution *x, un_status status) {
    if (status == UN_NOT_YET) return status;
    record_end(x->g, x->record, status);
    if (!status) return status;
    atomic_thread_fence(memory_order_release); /* see look_at_abort */
    write_failure_notes(x->g, x->call, x->number);
    return status;
}

/* With the call lock: one call, unless the group has failed. `record`: of a call from the queue. */
static un_status carry_out(execution *x, un_group *g, const un_call *call, patience patience,
                           uint64_t record, un_status (*body)(execution *)) {
    if (read_word(&g->calls.noticed_end)) return fail_from_abort(g);
    uint64_t number = read_word(&g->calls.latest) + 1;
    write_word(&g->calls.latest, number);
    *x = (execution){.g = g, .call = call, .number = number, .patience = patience};
    if (record)
        record_call(g, record, number);
    else
        record = open_call_record(g, call, number, ARRIVED);
    x->record = record;
    return end_call(x, read_word(&g->segment.header->abort) ? fail_from_abort(g) : body(x));
}

/* -- works ------------------------------------------------------------------------------------- */

/* One step, and peers read only our descriptor: we may finish our side at any time. */
static bool is_short(const execution *x) {
    bool uses_blocks = x->may_be_direct && atomic_load(&x->g->blocks.count);
    return x->steps == 1 && !x->combine && !x->learn && !x->call->schedule && !uses_blocks &&
           !x->takes_lanes && !(x->call->form & UN_CONTRIBUTIONS);
}

bool begin_work(un_group *g, un_work *work) {
    if (read_word(&g->calls.noticed_end) || read_word(&g->segment.header->abort)) return false;
    execution *x = g->worker.begun;
    *x = (execution){.g = g,
                     .call = &work->call,
                     .number = read_word(&g->calls.latest) + 1,
                     .record = work->record};
    if (prepare(x) || !is_short(x)) return false;
    write_word(&g->calls.latest, x->number);
    record_call(g, x->record, x->number);
    bring_and_post(x);
    work->begun = true;
    return true;
}

bool need_not_wait(const un_group *g) {
    if (g->poll) g->poll();
    uint64_t number = g->worker.begun->number;
    for (int rank = 0; rank < g->ranks; rank++)
        if (atomic_load_explicit(&descriptor_of(g, rank, number)->call, memory_order_acquire) <
            number)
            return false;
    return !g->worker.begun->may_be_direct || readable_givers(g->worker.begun) == NONE;
}

un_status run_work(un_group *g, un_work *work, const un_call *hooks, bool may_leave) {
    execution *x = g->worker.begun;
    patience waiting = {.call = hooks, .may_leave = may_leave};
    un_status status;
    if (work->begun) waiting.deadline_ns = x->patience.deadline_ns;
    x->patience = waiting;
    if (work->begun)
        status = end_call(x, meet_and_move(x));
    else
        status = carry_out(x, g, &work->call, waiting, work->record, run);
    work->begun |= status == UN_NOT_YET;
    return status;
}

/* -- blocking calls ---------------------------------------------------------------------------- */

/* In the caller's thread, after all works submitted before. */
static un_status run_locked(un_group *g, const un_call *call, uint64_t record,
                            un_status (*body)(execution *)) {
    if (group_is_inherited(g)) return UN_FORKED;
    patience p = {.call = call};
    un_status status = lock_calls(g, &p);
    if (status == UN_INTERRUPTED) interrupt(g, g->calls.latest); /* peers expect us */
    if (status) return status;
    if (atomic_load_explicit(&g->worker.queued, memory_order_relaxed)) {
        prepare_to_block(&p);
        run_queue(g, NULL, call, false);
    }
    execution x;
    status = carry_out(&x, g, call, p, record, body);
    unlock_calls(g);
    return status;
}

static un_status refuse_arguments(execution *x) { return refuse(x, UN_REFUSED); }

/* Only the size of the stream matters: nothing moves. */
static un_status compare(execution *x) {
    x->bytes = x->call->input->bytes;
    post_call(x, UN_OK);
    return meet(x);
}

un_status un_check(un_group *g, const un_call *call, uint64_t bytes, uint64_t record) {
    const un_stream sized = {.bytes = bytes};
    un_call checked = *call;
    checked.input = &sized;
    un_status status = run_locked(g, &checked, record, compare);
    if (!status) record_start(g, record);
    return status;
}

un_status un_run(un_group *g, const un_call *call) { return run_locked(g, call, 0, run); }

un_status un_gather_ragged(un_group *g, const un_call *call) {
    return run_locked(g, call, 0, gather_ragged);
}

un_status un_refuse(un_group *g, const un_call *call) {
    return run_locked(g, call, 0, refuse_arguments);
}
