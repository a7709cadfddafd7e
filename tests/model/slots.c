/* Two ranks move five pieces through four slots each, with a combining stage.
 *
 * move, publish, await_flag, slot_of: a slot is written again only after all have taken what was in it. */
#include "model.h"

#include "local/call.c"

uint64_t signature_of(un_operation operation, un_reduction reduction, int root, un_dtype dtype) { return 1; }

enum { STEPS = 5 };

un_status await_slowly(un_group *g, int peer, const flag_t *flag, uint64_t target, patience *p) {
    __VERIFIER_assume(false);
    return UN_OK;
}

static char *piece_of(execution *x, int rank, size_t step) { return slot_of(x->g, rank, x->number, step); }

static void bring_piece(execution *x, size_t step) { *piece_of(x, x->g->rank, step) = (char)(step + 1); }

static void combine_piece(execution *x, size_t step) {
    assert(*piece_of(x, 1 - x->g->rank, step) == (char)(step + 1));
    piece_of(x, x->g->rank, step)[1] = (char)(step + 1);
}

static void take_piece(execution *x, size_t step) {
    assert(piece_of(x, 1 - x->g->rank, step)[1] == (char)(step + 1));
}

static const un_call call = {.operation = UN_ALL_REDUCE};

static void *move_pieces(void *argument) {
    execution x = {.g = argument, .call = &call, .number = 1, .steps = STEPS};
    x.bring = bring_piece, x.combine = combine_piece, x.take = take_piece;
    bring_and_post(&x);
    assert(meet(&x) == UN_OK);
    assert(move(&x) == UN_OK);
    return NULL;
}

int main(void) {
    open_ranks();
    run_ranks(move_pieces);
    return 0;
}
