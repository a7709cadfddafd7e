// genmc: --check-liveness
/* Rank 0 finishes a step and closes the group; rank 1 waits for a step of rank 0.
 *
 * un_group_close, wake_everyone, await_slowly, look_around: who waits for a step that was finished gets
 * it, though its peer has closed since; who waits for one that will never come is told so. */
#include "model.h"

#include "base/group.c"
#include "base/system.c"
#include "base/wait.c"
#include "local/membership.c"

void stop_watching(un_group *g) {}
void stop_worker(un_group *g) {}
void stop_copiers(un_group *g) {}
void stop_progress_thread(un_group *g) {}
void leave_blocks(un_group *g) {}
void segment_unmap(un_group *g) {}
void free_traffic(un_group *g) {}
void ask_where(un_group *g, int rank, uint64_t call) {}

#ifndef AWAITED_TURN
#define AWAITED_TURN 1
#endif

static const un_call call = {.timeout_ns = INT64_MAX / 2};

static void *finish_and_close(void *argument) {
    un_group *g = argument;
    publish(g, &control_of(g, 0)->progress, 1);
    un_group_close(g);
    return NULL;
}

static void *wait_for_turn(void *argument) {
    un_group *g = argument;
    patience p = {.call = &call};
    un_status status = await_flag(g, 0, &control_of(g, 0)->progress, AWAITED_TURN, &p);
    assert(status == (AWAITED_TURN == 1 ? UN_OK : UN_PEER_CLOSED));
    return NULL;
}

int main(void) {
    open_ranks();
    pthread_t closes, waits;
    pthread_create(&closes, NULL, finish_and_close, &ranks[0]);
    pthread_create(&waits, NULL, wait_for_turn, &ranks[1]);
    pthread_join(closes, NULL);
    pthread_join(waits, NULL);
    return 0;
}
