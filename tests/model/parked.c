// genmc: --check-liveness
/* The progress thread is parked; a thread posts a message, and then the group closes.
 *
 * park, wake_progress_thread, stop_progress_thread: the progress thread sleeps through neither. */
#include "messages_model.h"

#define progress(g) false /* nothing moves: the message waits for its peer */
#include "local/progress_thread.c"

void end_if_unfinished(un_group *g, bool unfinished) { assert(!unfinished); }

static _Atomic bool is_taken;

static void *carry(void *argument) {
    un_group *g = argument;
    while (!atomic_load(&g->progress_thread.stops)) {
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
    wake_progress_thread(g);
    while (!atomic_load(&is_taken))
        ;
    stop_progress_thread(g);
    return NULL;
}

int main(void) {
    open_messages(-1);
    un_group *g = &ranks[0];
    g->progress_thread.has_thread = true;
    pthread_t posts;
    pthread_create(&g->progress_thread.thread, NULL, carry, g);
    pthread_create(&posts, NULL, post_and_stop, g);
    pthread_join(posts, NULL);
    return 0;
}
