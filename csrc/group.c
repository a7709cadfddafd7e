/* A group: opening and closing a membership in it, and how it ends. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>

#include "blocks.h"
#include "copiers.h"
#include "hosts.h"
#include "messages.h"
#include "reading.h"
#include "segment.h"
#include "watcher.h"
#include "worker.h"

/* Counts the forks above us, so that a child that still holds its parent's group is detected
 * without a system call. */
static _Atomic unsigned process_number;

static void note_fork(void) {
    atomic_fetch_add(&process_number, 1);
    forget_watching_after_fork();
    forget_network_after_fork();
}
static void watch_forks(void) { pthread_atfork(NULL, NULL, note_fork); }

static void free_group(un_group *g) {
    free(g->calls.sources);
    free(g->calls.descriptor_pitch);
    free(g->worker.begun);
    free(g->watching.peers);
    free_traffic(g);
    free(g->fifos);
    free(g);
}

/* Over the mapping of `other`, or over a new one. */
static un_status open_membership(const un_group *other, int descriptor, int rank, int ranks,
                            uint64_t nonce, un_group **group) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    if (rank < 0 || rank >= ranks || ranks > UN_MAX_RANKS) return UN_MISMATCH;
    un_group *g = aligned_alloc(_Alignof(un_group), sizeof *g);
    if (!g) return UN_SYSTEM;
    memset(g, 0, sizeof *g);
    g->rank = rank;
    g->ranks = ranks;
    g->calls.sources = calloc((size_t)ranks, sizeof *g->calls.sources);
    g->calls.descriptor_pitch = calloc((size_t)ranks, sizeof *g->calls.descriptor_pitch);
    g->watching.peers = calloc((size_t)ranks, sizeof *g->watching.peers);
    un_status status = UN_SYSTEM;
    g->fifos = calloc((size_t)ranks, sizeof *g->fifos);
    if (g->calls.sources && g->calls.descriptor_pitch && g->watching.peers && g->fifos && make_traffic(g))
        status = other ? segment_share(g, other) : segment_map(g, descriptor, nonce);
    if (status) {
        free_group(g);
        return status;
    }
    g->crowded = ranks > (int)g->segment.header->cores;
    g->cut_from = cut_from(ranks, g->crowded);
    g->direct_from = direct_from(g->crowded);
    g->roomy = 2 * ranks <= (int)g->segment.header->cores;
    g->copiers.wanted = copiers_for(ranks, (int)g->segment.header->cores);
    offer_reading(g);
    start_spinning(&g->spin);
    start_spinning(&g->messages.spin);
    g->process = atomic_load(&process_number);
    pthread_mutex_init(&g->worker.queue_lock, NULL);
    pthread_mutex_init(&g->messages.lock, NULL);
    pthread_mutex_init(&g->note_lock, NULL);
    pthread_mutex_init(&g->blocks.lock, NULL);
    *group = g;
    return UN_OK;
}

un_status un_group_open(int descriptor, int rank, int ranks, uint64_t nonce, un_group **group) {
    return open_membership(NULL, descriptor, rank, ranks, nonce, group);
}

un_status un_group_open_beside(const un_group *other, int rank, un_group **group) {
    if (group_is_inherited(other)) return UN_FORKED;
    return open_membership(other, -1, rank, other->ranks, 0, group);
}

/* Start a thread that leaves all signals to the program's own. Tools show its name: 15 letters. */
bool start_thread(pthread_t *thread, const char *name, void *(*body)(void *), void *argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = !pthread_create(thread, NULL, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started) pthread_setname_np(*thread, name);
    return started;
}

unsigned current_process(void) { return atomic_load(&process_number); }

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

enum { ABSENT_MS = 1000, STALLED_MS = 10 * 1000, ASK_EVERY = 64 };

bool un_group_finish(un_group *g, const un_call *hooks, bool *missing) {
    patience p = {.call = hooks};
    int64_t since = clock_ns();
    uint64_t seen = 0;
    for (int looks = 1; !group_is_inherited(g) && !status_from_abort(g); looks++) {
        unfinished left = {.missing = memset(missing, 0, (size_t)g->ranks * sizeof *missing)};
        look_at_works(g, &left);
        look_at_messages(g, &left);
        if (!left.any) return true;
        int64_t now = clock_ns();
        if (left.moved != seen) since = now;
        seen = left.moved;
        if (now - since > (left.moving ? STALLED_MS : ABSENT_MS) * (int64_t)1000000) return false;
        prepare_to_block(&p);
        if (g->spread) drive_network();
        if (looks % ASK_EVERY == 0 && hooks->pause && hooks->pause(hooks->argument)) return false;
        sleep_ns(500 * 1000);
    }
    return true;
}

void end_if_unfinished(un_group *g, bool unfinished) {
    if (unfinished && !status_from_abort(g)) un_group_abort(g, "it closed the group");
}

void un_group_close(un_group *g) {
    if (!group_is_inherited(g)) { /* a forked child has no mapping and closes nothing */
        stop_watching(g);
        stop_worker(g);
        stop_progress_thread(g);
        while (atomic_exchange(&g->worker.call_lock, 1)) sched_yield();
        stop_copiers(g);
        control *mine = control_of(g, g->rank);
        atomic_store_explicit(&mine->closed, 1, memory_order_seq_cst);
        if (atomic_load_explicit(&mine->sleepers, memory_order_seq_cst)) wake_everyone(g);
        if (g->spread) close_spread(g);
        leave_blocks(g);
        segment_unmap(g);
        pthread_mutex_destroy(&g->worker.queue_lock);
        pthread_mutex_destroy(&g->messages.lock);
        pthread_mutex_destroy(&g->note_lock);
        pthread_mutex_destroy(&g->blocks.lock);
    }
    free_group(g);
}

bool take_abort(un_group *g, uint64_t word) {
    uint64_t none = 0;
    if (!atomic_compare_exchange_strong(&g->segment.header->abort, &none, word)) return false;
    if (g->spread) abort_group(g->spread->inner, (un_status)(word & 0xff), -1, 0);
    wake_everyone(g);
    return true;
}

/* The abort word: status in 8 bits, rank in 16, call in 40. The first fault wins. */
void abort_group(un_group *g, un_status status, int rank, uint64_t call) {
    uint64_t word = (uint64_t)status | (uint64_t)(uint16_t)rank << 8 | call << 24;
    if (take_abort(g, word) && g->spread) spread_abort(g, word);
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

bool un_group_has_closed(const un_group *g, int rank) {
    if (group_is_inherited(g) || rank < 0 || rank >= g->ranks) return false;
    return atomic_load(&control_of(g, rank)->closed);
}

/* Another rank may have noticed a death before us. */
bool un_group_has_lost(const un_group *g, int rank, int64_t *detail) {
    *detail = 0;
    if (group_is_inherited(g) || rank < 0 || rank >= g->ranks) return false;
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
        un_group_has_lost(g, failure.rank, &failure.detail);
    }
    return failure;
}

void un_group_set_eager(un_group *g, int64_t bytes) {
    pthread_mutex_lock(&g->messages.lock);
    g->messages.eager_bytes = bytes;
    pthread_mutex_unlock(&g->messages.lock);
}

uint64_t un_group_calls(const un_group *g) { return g->calls.latest; }

int un_group_descriptor(const un_group *g) { return g->segment.descriptor; }
