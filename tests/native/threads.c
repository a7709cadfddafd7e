/* The engine with its ranks as threads of one process, over one mapping.
 *
 * threads [name]: run all tests, or those whose name contains `name`. ThreadSanitizer sees neither
 * across processes nor through two mappings of the same memory; here it sees every access of every
 * rank. Results are compared with expectations that are computed by another way.
 */
#define _GNU_SOURCE
#include <unistd.h>

#include "threads.h"

enum { LIMIT_S = 300 }; /* nothing here takes so long, unless it hangs */

void wrong(const char *file, int line, const char *what, long seen, long wanted) {
    fprintf(stderr, "%s:%d: %s is %ld, not %ld\n", file, line, what, seen, wanted);
    _exit(1);
}

void expect_equal(const char *file, int line, const char *what, long seen, long wanted) {
    if (seen != wanted) wrong(file, line, what, seen, wanted);
}

uint64_t scramble(uint64_t value) { /* splitmix64, Steele, Lea and Flood 2014 */
    value += 0x9e3779b97f4a7c15u;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    value = (value ^ value >> 27) * 0x94d049bb133111ebu;
    return value ^ value >> 31;
}

void sleep_ms(int milliseconds) {
    struct timespec moment = {.tv_sec = milliseconds / 1000,
                              .tv_nsec = milliseconds % 1000 * MILLISECOND_NS};
    nanosleep(&moment, NULL);
}

pthread_t start(void *(*body)(void *), void *argument) {
    pthread_t thread;
    EXPECT(!pthread_create(&thread, NULL, body, argument));
    return thread;
}

void join(pthread_t thread) { EXPECT(!pthread_join(thread, NULL)); }

void open_groups(int ranks, int cores, un_group **groups) {
    static _Atomic uint64_t nonce;
    uint64_t number = ++nonce;
    int descriptor = un_segment_create(ranks, cores, number);
    EXPECT(descriptor >= 0);
    EXPECT_EQUAL(un_group_open(descriptor, ranks - 1, ranks, number + 1, groups), UN_MISMATCH);
    EXPECT_EQUAL(un_group_open(descriptor, 0, ranks, number, groups), UN_OK);
    close(descriptor);
    EXPECT_EQUAL(un_group_open_beside(groups[0], ranks, groups), UN_MISMATCH);
    for (int rank = 1; rank < ranks; rank++)
        EXPECT_EQUAL(un_group_open_beside(groups[0], rank, &groups[rank]), UN_OK);
}

typedef struct rank_thread {
    membership membership;
    void (*body)(membership *);
    pthread_t thread;
} rank_thread;

static void *run_rank(void *argument) {
    rank_thread *t = argument;
    t->body(&t->membership);
    if (t->membership.group) un_group_close(t->membership.group);
    return NULL;
}

void run_ranks(int ranks, int cores, void (*body)(membership *), void *shared) {
    rank_thread threads[MOST_RANKS];
    un_group *groups[MOST_RANKS];
    open_groups(ranks, cores, groups);
    for (int rank = 0; rank < ranks; rank++) {
        threads[rank].membership = (membership){groups[rank], rank, ranks, shared};
        threads[rank].body = body;
        threads[rank].thread = start(run_rank, &threads[rank]);
    }
    for (int rank = 0; rank < ranks; rank++) join(threads[rank].thread);
}

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
    {"collectives", test_collectives},
    {"types and reductions", test_types},
    {"many groups", test_many_groups},
    {"compiled schedules", test_schedules},
    {"blocks", test_blocks},
    {"works", test_works},
    {"gathers of any lengths", test_ragged},
    {"messages", test_messages},
    {"messages that end badly", test_message_failures},
    {"damaged messages", test_damage},
    {"calls that end badly", test_call_failures},
    {"sleepers", test_sleepers},
    {"processes", test_processes},
    {"processors", test_processors},
};

int main(int count, char **arguments) {
    alarm(LIMIT_S);
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        if (count > 1 && !strstr(tests[i].name, arguments[1])) continue;
        struct timespec before, after;
        clock_gettime(CLOCK_MONOTONIC, &before);
        tests[i].run();
        clock_gettime(CLOCK_MONOTONIC, &after);
        printf("%-24s ok %6.1f s\n", tests[i].name,
               (double)(after.tv_sec - before.tv_sec) +
                   1e-9 * (double)(after.tv_nsec - before.tv_nsec));
        fflush(stdout);
    }
    return 0;
}
