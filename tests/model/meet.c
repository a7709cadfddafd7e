/* Two ranks make three calls: each brings a byte into its descriptor, posts, meets and takes.
 *
 * post_call, meet, publish, await_flag: whoever has met reads what was brought, and no descriptor is written
 * while a peer that is one call behind reads it. */
#include "model.h"

#include "local/call.c"

uint64_t signature_of(un_operation operation, un_reduction reduction, int root, un_dtype dtype) { return 1; }

un_status await_slowly(un_group *g, int peer, const flag_t *flag, uint64_t target, patience *p) {
    __VERIFIER_assume(false); /* whoever looks too early: see sleep.c */
    return UN_OK;
}

static char byte_of(int rank, uint64_t call) { return (char)(10 * call + (uint64_t)rank); }

static void bring_byte(execution *x, size_t turn) {
    descriptor_of(x->g, x->g->rank, x->number)->payload[0] = byte_of(x->g->rank, x->number);
}

static void take_byte(execution *x, size_t turn) {
    int peer = 1 - x->g->rank;
    assert(descriptor_of(x->g, peer, x->number)->payload[0] == byte_of(peer, x->number));
}

static const un_call call = {.operation = UN_ALL_GATHER};

static void *make_calls(void *argument) {
    for (uint64_t number = 1; number <= 3; number++) {
        execution x = {.g = argument, .call = &call, .number = number, .bring = bring_byte};
        bring_and_post(&x);
        assert(meet(&x) == UN_OK);
        take_byte(&x, 0);
    }
    return NULL;
}

int main(void) {
    open_ranks();
    run_ranks(make_calls);
    return 0;
}
