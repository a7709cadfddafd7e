/* Three ranks decide on one serial, each for a value of its own; one has decided on the next already.
 *
 * un_group_decide: no two decisions for one serial. */
#define RANKS 3
#include "model.h"

#include "base/group.c"

unsigned current_process(void) { return 0; }

static int64_t decided[RANKS];

static void *decide(void *argument) {
    un_group *g = argument;
    decided[g->rank] = un_group_decide(g, UN_OF_PROGRAM, 1, (uint32_t)g->rank);
    /* The word of serial 1 serves for 1 + DECISIONS, too. */
    if (g->rank == 2) assert(un_group_decide(g, UN_OF_PROGRAM, 1 + DECISIONS, 7) == 7);
    return NULL;
}

int main(void) {
    open_ranks();
    run_ranks(decide);
    int64_t first = -1;
    for (int rank = 0; rank < RANKS; rank++) {
        if (decided[rank] < 0) continue; /* forgotten */
        assert(first < 0 || decided[rank] == first);
        first = decided[rank];
    }
    assert(decided[2] >= 0);
    return 0;
}
