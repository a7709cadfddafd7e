/* A message of four bytes goes through a ring of two, a byte at a time.
 *
 * put_into_ring, take_from_ring: the bytes come in their order, and none is written over unread. */
#include "messages_model.h"

enum { BYTES = 4 };

static void *pass_bytes(void *argument) {
    un_group *g = argument;
    int peer = 1 - g->rank;
    while (!un_message_done(&messages[g->rank][0]))
        __VERIFIER_assume((g->rank ? take_from_ring : put_into_ring)(g, peer));
    if (g->rank) check_messages(1, BYTES);
    return NULL;
}

int main(void) {
    start_moving(BYTES);
    run_ranks(pass_bytes);
    return 0;
}
