// genmc: --check-liveness
/* The courier is parked; a thread posts a message, and then the group closes.
 *
 * park, call_courier, stop_courier: the courier sleeps through neither. */
#include "messages_model.h"

#define progress(g) false /* nothing moves: the message waits for its peer */
#include "courier.c"

void end_if_unfinished(un_group *g, bool unfinished) { assert(!unfinished); }

static _Atomic bool is_taken;

static void *carry(void *argument) {
    un_group *g = argument;
    while (!atomic_load(&g->courier.stops)) {
        park(g);
        pthread_mutex_lock(&g->messages.lock);
        if (g->messages.oldest) atomic_store(&is_taken, true);
        g->messages.oldest = NULL;
        pthread_mutex_unlock(&g->messages.lock);
    }
    return NULL;
}

static void *post_and_stop(void *argument) {
    un_group *g = argument;
    pthread_mutex_lock(&g->messages.lock);
    g->messages.oldest = &messages[0][0];
    pthread_mutex_unlock(&g->messages.lock);
    call_courier(g);
    while (!atomic_load(&is_taken))
        ;
    stop_courier(g);
    return NULL;
}

int main(void) {
    open_messages(-1);
    un_group *g = &ranks[0];
    g->courier.has_thread = true;
    pthread_t posts;
    pthread_create(&g->courier.thread, NULL, carry, g);
    pthread_create(&posts, NULL, post_and_stop, g);
    pthread_join(posts, NULL);
    return 0;
}
