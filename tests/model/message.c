// genmc: --check-liveness
/* Rank 0 sends a small message, and sleeps until it is answered; rank 1 sleeps until it is there.
 *
 * progress, announce_sends, open_channel, take_entries, deliver, write_reply, read_replies, ring_bell,
 * sleep_at_doorbell: the message arrives, and nobody sleeps through it or its answer. */
#include "messages_model.h"

#include "local/progress_thread.c"

static void *pass_message(void *argument) {
    un_group *g = argument;
    un_message *m = &messages[g->rank][0];
    while (!un_message_done(m)) sleep_at_doorbell(g, 1);
    if (g->rank) check_messages(1, 1);
    return NULL;
}

int main(void) {
    open_messages(-1);
    prepare_messages(1, 1);
    start_sending(&ranks[0], &messages[0][0]);
    start_receiving(&ranks[1], &messages[1][0]);
    run_ranks(pass_message);
    return 0;
}
