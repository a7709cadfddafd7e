/* A group: taking and leaving a place in it, and how it ends. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "internal.h"

/* Counts forks above us, so that a child which still holds its parent's group is found out
 * without a system call. */
static _Atomic unsigned process_number;

static void note_fork(void) { atomic_fetch_add(&process_number, 1); }
static void watch_forks(void) { pthread_atfork(NULL, NULL, note_fork); }

static void free_group(un_group *g) {
    free(g->sources);
    free(g->post_pitch);
    free(g);
}

un_status un_group_open(int descriptor, int rank, int ranks, uint64_t nonce, un_group **group) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    if (rank < 0 || rank >= ranks || ranks > UN_MAX_RANKS) return UN_MISMATCH;
    un_group *g = calloc(1, sizeof *g);
    if (!g) return UN_SYSTEM;
    g->rank = rank;
    g->ranks = ranks;
    g->sources = calloc((size_t)ranks, sizeof *g->sources);
    g->post_pitch = calloc((size_t)ranks, sizeof *g->post_pitch);
    un_status status = UN_SYSTEM;
    if (g->sources && g->post_pitch) status = segment_map(g, descriptor, nonce);
    if (status) {
        free_group(g);
        return status;
    }
    g->crowded = ranks > (int)g->header->cores;
    g->spin_ns = 100 * 1000;
    g->process = atomic_load(&process_number);
    *group = g;
    return UN_OK;
}

bool group_is_inherited(const un_group *g) { return g->process != atomic_load(&process_number); }

static void wake_everyone(un_group *g) {
    for (int rank = 0; rank < g->ranks; rank++) {
        control *c = control_of(g, rank);
        wake_sleepers(&c->progress);
        wake_sleepers(&c->posts[0].call);
        wake_sleepers(&c->posts[1].call);
    }
}

void un_group_close(un_group *g) {
    if (!group_is_inherited(g)) { /* a forked child has no mapping and closes nothing */
        while (atomic_exchange(&g->busy, 1)) sched_yield();
        control *mine = control_of(g, g->rank);
        atomic_store_explicit(&mine->closed, 1, memory_order_seq_cst);
        if (atomic_load_explicit(&mine->sleepers, memory_order_seq_cst)) wake_everyone(g);
        segment_unmap(g);
    }
    free_group(g);
}

/* The abort word: status in 8 bits, rank in 16, call in 40. The first fault wins. */
static uint64_t abort_word(const un_failure *f) {
    return (uint64_t)f->status | (uint64_t)(uint16_t)f->rank << 8 | f->call << 24;
}

un_status fail(un_group *g, un_status status, int rank, int64_t detail) {
    g->failure =
        (un_failure){.status = status, .rank = rank, .call = g->calls, .detail = detail};
    uint64_t none = 0;
    if (!atomic_compare_exchange_strong(&g->header->abort, &none, abort_word(&g->failure)))
        return fail_from_abort(g);
    wake_everyone(g);
    return status;
}

/* Somebody else's fault is ours too; only an interrupt reads differently from outside. */
un_status fail_from_abort(un_group *g) {
    uint64_t word = atomic_load_explicit(&g->header->abort, memory_order_acquire);
    un_status status = (un_status)(word & 0xff);
    int rank = (int16_t)(word >> 8 & 0xffff);
    if (status == UN_INTERRUPTED && rank != g->rank) status = UN_ABORTED;
    g->failure = (un_failure){.status = status, .rank = rank, .call = word >> 24};
    return status;
}

void un_group_abort(un_group *g) {
    if (group_is_inherited(g)) return;
    un_failure cause = {.status = UN_ABORTED, .rank = g->rank, .call = g->calls};
    uint64_t none = 0;
    if (atomic_compare_exchange_strong(&g->header->abort, &none, abort_word(&cause)))
        wake_everyone(g);
}

un_failure un_group_failure(const un_group *g) { return g->failure; }

uint64_t un_group_calls(const un_group *g) { return g->calls; }
