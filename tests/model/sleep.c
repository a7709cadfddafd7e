// genmc: --check-liveness
/* Rank 0 publishes; rank 1 waits for it, and sleeps where it comes too early.
 *
 * publish, wake, await_flag, await_slowly, sleep_for, sleep_on: nobody sleeps through its wake-up, and
 * whoever wakes up reads what was published. */
#include "model.h"

#include "base/system.c"
#include "base/wait.c"

un_status fail(un_group *g, un_status status, int rank) {
    assert(false);
    return status;
}

un_status fail_from_abort(un_group *g) { return fail(g, UN_ABORTED, -1); }
void ask_where(un_group *g, int rank, uint64_t call) {}

static const un_call call = {.timeout_ns = INT64_MAX / 2};
static char data;

static void publish_twice(un_group *g) {
    flag_t *progress = &control_of(g, 0)->progress;
    data = 1;
    publish(g, progress, 1);
}

static void wait_twice(un_group *g) {
    patience p = {.call = &call};
    assert(await_flag(g, 0, &control_of(g, 0)->progress, 1, &p) == UN_OK);
    assert(data == 1);
}

static void *run(void *argument) {
    un_group *g = argument;
    g->rank ? wait_twice(g) : publish_twice(g);
    return NULL;
}

int main(void) {
    open_ranks();
    run_ranks(run);
    return 0;
}
