// genmc: --check-liveness
/* A message goes through a ring, and each side sleeps while it cannot go on.
 *
 * put_into_ring, take_from_ring, ring_bell, sleep_at_doorbell: nobody sleeps through bytes or room. */
#include "messages_model.h"

#ifndef BYTES
#define BYTES 1
#endif

static bool step(un_group *g) {
    return g->rank ? take_from_ring(g, 0) : traffics[0][1].passed && put_into_ring(g, 1);
}

/* As sleep_at_doorbell looks for progress, of this message alone. */
#define progress(g) step(g)
#include "local/progress_thread.c"

static void *pass_bytes(void *argument) {
    un_group *g = argument;
    while (!un_message_done(&messages[g->rank][0])) sleep_at_doorbell(g, 1);
    return NULL;
}

int main(void) {
    start_moving(BYTES);
    if (BYTES > RING_BYTES) put_into_ring(&ranks[0], 1); /* it is full */
    run_ranks(pass_bytes);
    return 0;
}
