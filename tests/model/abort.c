/* Two ranks end the group, each for a reason of its own; a third one notices.
 *
 * un_group_abort, abort_group, take_abort, un_group_failure, un_group_write_note, un_group_read_note: all
 * name the same cause, and whoever knows it reads its reason. */
#define RANKS 3
#include "model.h"

#include "base/group.c"
#include "base/records.c"

unsigned current_process(void) { return 0; }
void wake(const void *word, enum whose whose, int most) {}
bool peer_is_dead(const un_group *g, int rank, int64_t *ending) { return false; }

static int blamed[RANKS];

static void look_at_failure(un_group *g) {
    un_failure failure = un_group_failure(g);
    blamed[g->rank] = failure.status ? failure.rank : -1;
    if (!failure.status) return;
    char text[UN_TEXT_BYTES];
    assert(un_group_read_note(g, failure.rank, UN_REASON, UN_ABOUT_MESSAGES, text));
    assert(text[0] == "01"[failure.rank]);
}

static void *end_or_notice(void *argument) {
    un_group *g = argument;
    if (g->rank < 2) un_group_abort(g, g->rank ? "1" : "0");
    look_at_failure(g);
    return NULL;
}

int main(void) {
    open_ranks();
    run_ranks(end_or_notice);
    assert(blamed[0] == blamed[1]);
    assert(blamed[2] == blamed[0] || blamed[2] == -1);
    return 0;
}
