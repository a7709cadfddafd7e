// genmc: --disable-race-detection
/* The giver's call fails, and its program goes on with its memory while rank 1 reads it: by the kernel, or
 * where it lies in a block. Rank 2 may be the one that ends the group.
 *
 * take_directly, take_by_kernel, look_at_abort, take_abort, end_call: what was read too late is no result. The
 * copy races, and may: whoever has read what was written afterwards finds the abort word, too. */
#define RANKS 3
#define GIVER_FAILS
#include "given.c"

#include "base/group.c"

#ifndef BLOCK
#define BLOCK NO_BLOCK
#endif

char *address_of(un_group *g, int rank, place where, size_t bytes) { return &memory[0]; }
void record_end(un_group *g, uint64_t number, un_status status) {}
unsigned current_process(void) { return 0; }
void wake(const void *word, enum whose whose, int most) {}
bool peer_is_dead(const un_group *g, int rank, int64_t *ending) { return false; }

static void *give_and_fail(void *argument) {
    execution x = meet_already(argument);
    __VERIFIER_assume(status_from_abort(x.g) != UN_OK);
    end_call(&x, fail_from_abort(x.g));
    memory[0] = 2;
    return NULL;
}

static void *read_directly(void *argument) {
    execution x = meet_already(argument);
    un_status status = take_directly(&x, x.call->output, 0, 0);
    if (!status) assert(memory[1] == 1);
    return NULL;
}

static void *end_group(void *argument) {
    abort_group(argument, UN_ABORTED, 2, 1);
    return NULL;
}

int main(void) {
    open_ranks();
    post_memory();
    ((place *)(void *)descriptor_of(&ranks[0], 0, 1)->payload)->block = BLOCK;
    pthread_t gives, reads, ends;
    pthread_create(&gives, NULL, give_and_fail, &ranks[0]);
    pthread_create(&reads, NULL, read_directly, &ranks[1]);
    pthread_create(&ends, NULL, end_group, &ranks[2]);
    pthread_join(gives, NULL);
    pthread_join(reads, NULL);
    pthread_join(ends, NULL);
    return 0;
}
