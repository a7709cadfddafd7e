/* Opening and closing a membership in a group. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>

#include "base/segment.h"
#include "base/watcher.h"
#include "local/blocks.h"
#include "local/copiers.h"
#include "local/messages.h"
#include "local/reading.h"
#include "local/worker.h"

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
    count_forks();
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
    if (g->calls.sources && g->calls.descriptor_pitch && g->watching.peers && g->fifos &&
        make_traffic(g))
        status = other ? segment_share(g, other) : segment_map(g, descriptor, nonce);
    if (status) {
        free_group(g);
        return status;
    }
    g->crowded = ranks > (int)g->segment.header->cores;
    g->cut_from = cut_from(ranks, g->crowded);
    g->direct_from = direct_from(g->crowded);
    g->described_most = DESCRIBED_MOST;
    g->roomy = 2 * ranks <= (int)g->segment.header->cores;
    g->copiers.wanted = copiers_for(ranks, (int)g->segment.header->cores);
    offer_reading(g);
    start_spinning(&g->spin);
    start_spinning(&g->messages.spin);
    g->process = current_process();
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

void un_group_configure(un_group *g, int64_t eager_bytes, bool may_read, int copiers,
                        int64_t spin_ns) {
    if (group_is_inherited(g)) return;
    if (!may_read) forbid_reading(g);
    if (copiers >= 0) g->copiers.wanted = copiers < COPIERS_MOST ? copiers : COPIERS_MOST;
    if (spin_ns >= 0 && !g->crowded) g->spin.ns = g->spin.most_ns = spin_ns;
    pthread_mutex_lock(&g->messages.lock);
    g->messages.eager_bytes = eager_bytes;
    pthread_mutex_unlock(&g->messages.lock);
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
        if (g->poll) g->poll();
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
        if (g->reach) g->reach->close(g);
        leave_blocks(g);
        segment_unmap(g);
        pthread_mutex_destroy(&g->worker.queue_lock);
        pthread_mutex_destroy(&g->messages.lock);
        pthread_mutex_destroy(&g->note_lock);
        pthread_mutex_destroy(&g->blocks.lock);
    }
    free_group(g);
}
