/* Rank 0 may be killed before any of its steps; a watcher ends the group then. Rank 1 waits for rank 0.
 *
 * publish, await_flag, await_slowly, look_around, abort_group, fail_from_abort: who waits gets what was
 * published, or learns who was lost; and after either the two agree. */
#define SLICES 1
#include "model.h"

#include "base/group.c"
#include "base/system.c"
#include "base/wait.c"

void ask_where(un_group *g, int rank, uint64_t call) {}

static const un_call call = {.timeout_ns = INT64_MAX / 2};
static _Atomic bool killed;
static char data[2];

static bool lives(void) { return !atomic_load_explicit(&killed, memory_order_relaxed); }

static void *publish_turns(void *argument) {
    un_group *g = argument;
    for (uint64_t turn = 1; turn <= 2; turn++) {
        if (!lives()) return NULL;
        data[turn - 1] = (char)turn;
        if (!lives()) return NULL;
        publish(g, &control_of(g, 0)->progress, turn);
    }
    return NULL;
}

static void *kill_and_notice(void *argument) {
    atomic_store_explicit(&killed, true, memory_order_relaxed);
    abort_group(argument, UN_PEER_LOST, 0, 0);
    return NULL;
}

static void *wait_for_turns(void *argument) {
    un_group *g = argument;
    patience p = {.call = &call};
    for (uint64_t turn = 1; turn <= 2; turn++) {
        un_status status = await_flag(g, 0, &control_of(g, 0)->progress, turn, &p);
        if (status) {
            assert(status == UN_PEER_LOST && un_group_failure(g).rank == 0);
            return NULL;
        }
        assert(data[turn - 1] == (char)turn);
    }
    return NULL;
}

bool peer_is_dead(const un_group *g, int rank, int64_t *ending) { return rank == 0; }

int main(void) {
    open_ranks();
    pthread_t publishes, kills, waits;
    pthread_create(&publishes, NULL, publish_turns, &ranks[0]);
    pthread_create(&kills, NULL, kill_and_notice, &ranks[1]);
    pthread_create(&waits, NULL, wait_for_turns, &ranks[1]);
    pthread_join(publishes, NULL);
    pthread_join(kills, NULL);
    pthread_join(waits, NULL);
    return 0;
}
