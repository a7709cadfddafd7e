/* Rank 0 combines into rank 1's memory; rank 1's call fails, and it goes on with its memory.
 *
 * combine_everywhere, combine_share, look_at_abort, wait_for_writers, abort_group: nobody writes into
 * memory whose owner has gone on. */
#include "model.h"

#include "base/group.c"
#include "local/direct.c"
#include "streams.h"

unsigned current_process(void) { return 0; }
void wake(const void *word, enum whose whose, int most) {}
int64_t clock_ns(void) { return 1; }
void sleep_ns(int64_t ns) { __VERIFIER_assume(false); } /* it would look again */
void prepare_to_block(patience *p) {}
bool peer_is_dead(const un_group *g, int rank, int64_t *ending) { return false; }

static char memory[RANKS][2]; /* of each rank: what it gives, and its output */

char *address_of(un_group *g, int rank, place where, size_t bytes) { return memory[rank]; }

static void run_kernel(void *to, const void *const *from, int sources, size_t count, double factor) {
    ((char *)to)[1] = 1;
}

static un_view view = {.bytes = 1};
static un_stream stream = {.views = &view, .bytes = 1};
static const un_call call = {.operation = UN_ALL_REDUCE, .input = &stream, .output = &stream};

static execution begin(un_group *g) {
    static const void *sources[RANKS][RANKS];
    g->calls.sources = sources[g->rank];
    return (execution){.g = g, .call = &call, .number = 1, .reducer = {.unit = 1, .run = run_kernel}};
}

static void *combine(void *argument) {
    execution x = begin(argument);
    combine_everywhere(&x);
    return NULL;
}

static void *fail_and_go_on(void *argument) {
    un_group *g = argument;
    execution x = begin(g);
    abort_group(g, UN_INTERRUPTED, g->rank, 1);
    wait_for_writers(&x);
    memory[1][0] = 2;
    return NULL;
}

int main(void) {
    open_ranks();
    pthread_t combines, fails;
    pthread_create(&combines, NULL, combine, &ranks[0]);
    pthread_create(&fails, NULL, fail_and_go_on, &ranks[1]);
    pthread_join(combines, NULL);
    pthread_join(fails, NULL);
    return 0;
}
