/* Rank 0 puts four bytes into a FIFO that holds two; rank 1 takes them.
 *
 * put, take, publish, await_flag: the bytes come in their order, and none is written over unread. */
#include "model.h"

#include "local/schedules.c"
#include "streams.h"

enum { BYTES = 4 };

un_status await_slowly(un_group *g, int peer, const flag_t *flag, uint64_t target, patience *p) {
    __VERIFIER_assume(false);
    return UN_OK;
}

static char sent[BYTES] = {1, 2, 3, 4}, had[BYTES];
static un_view views[RANKS] = {{.data = sent, .bytes = BYTES}, {.data = had, .bytes = BYTES}};
static un_stream streams[RANKS] = {{.views = &views[0], .bytes = BYTES}, {.views = &views[1], .bytes = BYTES}};
static fifo_ends ends[RANKS][RANKS];
static un_call calls[RANKS];

static void *pass(void *argument) {
    un_group *g = argument;
    g->fifos = ends[g->rank];
    calls[g->rank].output = &streams[g->rank];
    un_move m = {.peer = 1 - g->rank, .action = g->rank ? UN_COPY : UN_PUT};
    execution x = {.g = g, .call = &calls[g->rank]};
    assert((g->rank ? take : put)(&x, &m, (span){0, BYTES}) == UN_OK);
    return NULL;
}

int main(void) {
    open_ranks();
    run_ranks(pass);
    for (int i = 0; i < BYTES; i++) assert(had[i] == i + 1);
    return 0;
}
