/* How a group ends, and what it decides. */
#include "base/group.h"

#include "base/wait.h"
#include "base/watcher.h"

bool group_is_inherited(const un_group *g) { return g->process != current_process(); }

void wake_everyone(un_group *g) {
    for (int rank = 0; rank < g->ranks; rank++) {
        control *c = control_of(g, rank);
        wake(&c->progress, OF_RANKS, INT_MAX);
        wake(&c->descriptors[0].call, OF_RANKS, INT_MAX);
        wake(&c->descriptors[1].call, OF_RANKS, INT_MAX);
        wake(&c->doorbell, OF_RANKS, INT_MAX);
    }
}

bool take_abort(un_group *g, uint64_t word) {
    uint64_t none = 0;
    if (!atomic_compare_exchange_strong(&g->segment.header->abort, &none, word)) return false;
    wake_everyone(g);
    return true;
}

/* The abort word: status in 8 bits, rank in 16, call in 40. The first fault wins. */
void abort_group(un_group *g, un_status status, int rank, uint64_t call) {
    uint64_t word = (uint64_t)status | (uint64_t)(uint16_t)rank << 8 | call << 24;
    if (take_abort(g, word) && g->reach) g->reach->abort(g, word);
}

static int culprit(const un_group *g, uint64_t word) {
    int rank = (int16_t)(word >> 8 & 0xffff);
    return rank < g->ranks ? rank : -1;
}

/* A message does not match its receive: record the receiver, and the sender's handle of it. */
void abort_unfit(un_group *g, int sender, uint64_t handle) {
    abort_group(g, UN_UNFIT, sender, handle << 16 | (uint64_t)g->rank);
}

/* The handle and the receiver, if this rank sent it; otherwise 0. */
uint64_t unfit_handle(const un_group *g, int *receiver) {
    uint64_t word = atomic_load(&g->segment.header->abort);
    if ((un_status)(word & 0xff) != UN_UNFIT || culprit(g, word) != g->rank) return 0;
    *receiver = (int)(word >> 24 & 0xffff);
    return *receiver < g->ranks ? word >> 40 : 0;
}

un_status fail(un_group *g, un_status status, int rank) {
    abort_group(g, status, rank, g->calls.latest);
    return fail_from_abort(g);
}

/* A peer's failure is ours too; only an interrupt has another status on the peers. */
static un_status status_of(const un_group *g, uint64_t word) {
    un_status status = (un_status)(word & 0xff);
    return status == UN_INTERRUPTED && culprit(g, word) != g->rank ? UN_ABORTED : status;
}

un_status status_from_abort(const un_group *g) {
    return status_of(g, atomic_load_explicit(&g->segment.header->abort, memory_order_acquire));
}

/* The compare-and-swap is an acquire even on failure: a thread that finds the end noticed by
 * another sees the abort word too. */
un_status fail_from_abort(un_group *g) {
    uint64_t not_yet = 0;
    atomic_compare_exchange_strong(&g->calls.noticed_end, &not_yet, g->calls.latest + 1);
    return status_from_abort(g);
}

un_status interrupt(un_group *g, uint64_t call) {
    if (!status_from_abort(g))
        un_group_write_note(g, UN_REASON, UN_ABOUT_MESSAGES,
                            "it was interrupted by Ctrl-C, or by a signal handler that raised");
    abort_group(g, UN_INTERRUPTED, g->rank, call);
    return fail_from_abort(g);
}

void un_group_abort(un_group *g, const char *reason) {
    if (group_is_inherited(g)) return;
    if (reason) un_group_write_note(g, UN_REASON, UN_ABOUT_MESSAGES, reason);
    abort_group(g, UN_ABORTED, g->rank, g->calls.latest);
}

/* A serial is never decided twice: its word only ever goes up. */
int64_t un_group_decide(un_group *g, un_book book, uint32_t serial, uint32_t value) {
    if (group_is_inherited(g)) return -1;
    flag_t *word = &g->segment.header->decisions[book][serial % DECISIONS];
    uint64_t seen = atomic_load(word), proposed = (uint64_t)serial << 32 | value;
    while (value != UN_NOTHING && seen >> 32 < serial)
        if (atomic_compare_exchange_weak(word, &seen, proposed)) return value;
    return seen >> 32 == serial ? (int64_t)(seen & UINT32_MAX) : -1;
}

/* Another rank may have noticed a death before us. */
bool has_lost(const un_group *g, int rank, int64_t *detail) {
    *detail = 0;
    if (rank < 0) return false;
    uint64_t word = atomic_load_explicit(&g->segment.header->abort, memory_order_acquire);
    uint64_t ending = read_word(&control_of(g, rank)->ending);
    if (ending) *detail = ending == 1 ? 0 : (int64_t)ending;
    return ending || peer_is_dead(g, rank, detail) ||
           (status_of(g, word) == UN_PEER_LOST && culprit(g, word) == rank);
}

/* Made anew for each caller, in any thread. A death happens to each rank in its own call. */
un_failure un_group_failure(un_group *g) {
    if (group_is_inherited(g)) return (un_failure){.status = UN_FORKED, .rank = -1};
    uint64_t word = atomic_load_explicit(&g->segment.header->abort, memory_order_acquire);
    if (!word) return (un_failure){0};
    un_status status = fail_from_abort(g);
    un_failure failure = {.status = status, .rank = culprit(g, word), .call = word >> 24};
    if (status == UN_UNFIT) {
        failure.detail = failure.call & 0xffff;
        failure.call = 0;
    }
    if (status == UN_PEER_LOST) {
        failure.call = g->calls.noticed_end - 1;
        has_lost(g, failure.rank, &failure.detail);
    }
    return failure;
}

uint64_t un_group_calls(const un_group *g) { return g->calls.latest; }
