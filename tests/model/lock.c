// genmc: --check-liveness
/* Two threads of a process make a call each.
 *
 * lock_calls, try_lock_calls, unlock_calls: one is in a call at a time, and nobody sleeps through its turn. */
#include "model.h"

#include "base/system.c"
#include "base/wait.c"
#include "local/worker.c"

enum { THREADS = 2 };

/* GenMC takes a loop that changes nothing for one that waits: this one counts. */
static int count(void *argument) {
    ++*(int *)argument;
    return 0;
}

static un_call hooks[THREADS];
static int slept[THREADS], calls;

static void *make_call(void *argument) {
    un_group *g = &ranks[0];
    patience p = {.call = argument};
    assert(lock_calls(g, &p) == UN_OK);
    calls++;
    unlock_calls(g);
    return NULL;
}

int main(void) {
    open_ranks();
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        hooks[i].pause = count, hooks[i].argument = &slept[i];
        pthread_create(&threads[i], NULL, make_call, &hooks[i]);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    assert(calls == THREADS);
    return 0;
}
