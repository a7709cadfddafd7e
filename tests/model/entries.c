/* Rank 0 announces five messages in four entries; rank 1 reads them.
 *
 * announce_sends, open_channel, has_room, take_entries, has_come, publish_freed, deliver: each entry is
 * read before it is written again. */
#include "messages_model.h"

enum { MESSAGES = 5 };

static void *pass_messages(void *argument) {
    un_group *g = argument;
    struct traffic *t = &traffics[g->rank][1 - g->rank];
    if (!g->rank) {
        while (t->sends.first) __VERIFIER_assume(announce_sends(g, 1));
        return NULL;
    }
    __VERIFIER_assume(is_open(g, 0));
    while (t->entries_read < MESSAGES) __VERIFIER_assume(take_entries(g, 0));
    check_messages(MESSAGES, 1);
    return NULL;
}

int main(void) {
    start_messages(MESSAGES, 1);
    run_ranks(pass_messages);
    return 0;
}
