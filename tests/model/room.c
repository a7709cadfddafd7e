// genmc: --check-liveness
/* Four entries are announced, which is all that there is room for; rank 0 sleeps until it can announce a
 * fifth one. Rank 1 reads them all, and sleeps in between.
 *
 * announce_sends, has_room, take_entries, publish_freed, ring_bell, sleep_at_doorbell: nobody sleeps
 * through room. */
#include "messages_model.h"

enum { MESSAGES = ENTRIES + 1 };

static bool step(un_group *g) { return g->rank ? take_entries(g, 0) : announce_sends(g, 1); }

/* As sleep_at_doorbell looks for progress, of these messages alone. */
#define progress(g) step(g)
#include "local/progress_thread.c"

static void *pass_messages(void *argument) {
    un_group *g = argument;
    struct traffic *t = &traffics[g->rank][1 - g->rank];
    while (g->rank ? t->entries_read < MESSAGES : t->sends.first != NULL) sleep_at_doorbell(g, 1);
    return NULL;
}

int main(void) {
    start_messages(MESSAGES, 1);
    announce_sends(&ranks[0], 1);
    run_ranks(pass_messages);
    return 0;
}
