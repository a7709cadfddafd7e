/* Rank 0 gives memory of its own, which rank 1 has the kernel copy; the kernel may refuse.
 *
 * run_direct, take_by_kernel, offer_reading, read_peer, finish_step, is_unread: the reader has what was
 * given, and nobody reads the giver's memory once its call is over; where the kernel refuses, both know. */
#include "model.h"
#include <sys/uio.h>

static ssize_t copy_by_kernel(int pid, const struct iovec *here, const struct iovec *there);
#define process_vm_readv(pid, here, count, there, ...) copy_by_kernel(pid, here, there)

#include "local/call.c"
#include "local/direct.c"
#include "local/reading.c"
#include "streams.h"

uint64_t signature_of(un_operation operation, un_reduction reduction, int root, un_dtype dtype) { return 1; }
bool peer_lives(const un_group *g, int rank) { return true; }
int pid_of_peer(const un_group *g, int rank) { return 1 + rank; }
void begin_reading(un_group *g) {}
void end_reading(un_group *g) {}

static _Atomic bool refuses;
static char memory[RANKS] = {1}; /* what is given, and where it is to go */

static ssize_t copy_by_kernel(int pid, const struct iovec *here, const struct iovec *there) {
    assert(pid == 1);
    if (atomic_load_explicit(&refuses, memory_order_relaxed)) return -1;
    *(uint64_t *)here[0].iov_base = *(const uint64_t *)there[0].iov_base;
    memcpy(here[1].iov_base, there[1].iov_base, here[1].iov_len);
    return (ssize_t)(here[0].iov_len + here[1].iov_len);
}

static un_view views[RANKS] = {{.data = &memory[0], .bytes = 1}, {.data = &memory[1], .bytes = 1}};
static un_stream streams[RANKS] = {{.views = &views[0], .bytes = 1}, {.views = &views[1], .bytes = 1}};
static un_call calls[RANKS];
static size_t pitches[RANKS][RANKS];

/* All have posted, and met. */
static execution meet_already(un_group *g) {
    un_call *call = &calls[g->rank];
    call->operation = UN_BROADCAST, call->input = call->output = &streams[g->rank];
    g->calls.descriptor_pitch = pitches[g->rank];
    return (execution){.g = g, .call = call, .number = 1};
}

static void post_memory(void) {
    descriptor *mine = descriptor_of(&ranks[0], 0, 1);
    place *where = (place *)(void *)mine->payload;
    where->block = NO_BLOCK, where->offset = (uintptr_t)&memory[0];
    write_word(&mine->signature, IN_PROCESS);
    for (int rank = 0; rank < RANKS; rank++) {
        ranks[rank].segment.header->nonce = 7;
        offer_reading(&ranks[rank]);
    }
}

#ifndef GIVER_FAILS

bool group_is_inherited(const un_group *g) { return false; }

un_status await_slowly(un_group *g, int peer, const flag_t *flag, uint64_t target, patience *p) {
    __VERIFIER_assume(false); /* whoever looks too early: see sleep.c */
    return UN_OK;
}

un_status fail_from_abort(un_group *g) {
    assert(false);
    return UN_ABORTED;
}

static un_status ended[RANKS];

static void *run_call(void *argument) {
    un_group *g = argument;
    execution x = meet_already(g);
    ended[g->rank] = run_direct(&x);
    if (!g->rank)
        memory[0] = 2; /* it is the program's again */
    else if (!ended[1])
        assert(memory[1] == 1);
    return NULL;
}

static void *refuse_some(void *argument) {
    atomic_store_explicit(&refuses, true, memory_order_relaxed);
    return NULL;
}

int main(void) {
    open_ranks();
    post_memory();
    pthread_t kernel;
    pthread_create(&kernel, NULL, refuse_some, NULL);
    run_ranks(run_call);
    pthread_join(kernel, NULL);
    assert(ended[0] == ended[1]);
    assert(!ended[0] || !may_read_peers(&ranks[0]));
    return 0;
}

#endif
