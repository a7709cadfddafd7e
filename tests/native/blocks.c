/* Blocks: calls whose memory all ranks have mapped, and mixes of those with others. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "local/blocks.h"
#include "base/wait.h"
#include "threads.h"

enum { PART_BYTES = 4 * 1024 * 1024 };

typedef struct shared_block {
    un_block *first; /* rank 0's, over whose mapping the others open theirs */
    uint64_t with;   /* a bit for each rank whose tensors lie there */
    uint64_t number;
    uint64_t outside; /* an offset behind a part's end, or before its beginning */
} shared_block;

/* Every rank opens the block that rank 0 has made. */
static un_block *open_block(membership *me, shared_block *shared) {
    un_block *block = NULL;
    uint64_t bytes[MOST_RANKS];
    for (int rank = 0; rank < me->ranks; rank++) bytes[rank] = PART_BYTES;
    un_call all = barrier();
    if (!me->rank) {
        int descriptor = un_block_create(me->ranks, bytes);
        EXPECT(descriptor >= 0);
        EXPECT_EQUAL(un_block_open(me->group, descriptor, bytes, &block), UN_OK);
        close(descriptor);
        shared->first = block;
    }
    EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
    if (me->rank) EXPECT_EQUAL(un_block_open_beside(me->group, shared->first, &block), UN_OK);
    EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
    un_block_use(block, shared->number);
    EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
    return block;
}

/* Around the limits of descriptors, of slots, of direct calls and of pieces. */
static const size_t sizes[] = {1508, 72 * 1024, 280 * 1024 + 48};

static void run_in_block(membership *me) {
    shared_block *shared = me->shared;
    un_block *block = open_block(me, shared);
    arena mine = {0};
    mine.memory = un_block_part(block, me->rank, &mine.bytes);
    EXPECT_EQUAL(mine.bytes, PART_BYTES);
    EXPECT_EQUAL(un_group_owner(me->group, mine.memory, mine.bytes), me->rank);
    EXPECT_EQUAL(un_group_owner(me->group, mine.memory, mine.bytes + 1), -1);
    if (shared->with >> me->rank & 1) scenario_memory = &mine;
    uint64_t seed = 1;
    for (un_operation o = UN_BARRIER; o <= UN_ALL_TO_ALL; o++)
        for (size_t size = 0; size < sizeof sizes / sizeof *sizes; size++)
            for (int variant = 0; variant < 4; variant += 1 + (int)(seed % 3)) {
                bool wide = o > UN_BROADCAST;
                scenario c = {.operation = o,
                              .type = COMPLEX128,
                              .root = (int)(seed % (uint64_t)me->ranks),
                              .items = sizes[size] / 16 / (wide ? (size_t)me->ranks : 1),
                              .uneven = variant & 1,
                              .in_place = variant & 2,
                              .shape = seed % 5 ? CONTIGUOUS : STRIDED,
                              .seed = seed};
                seed++;
                run_scenario(me, &c);
            }
    for (int i = 0; i < 8; i++)
        run_random_scenario(me, scramble(shared->with + (uint64_t)i), 12000);
    scenario_memory = NULL;
    un_block_release(block);
}

/* Blocks come and go, in different orders, while calls go on. */
static void come_and_go(membership *me) {
    shared_block *shared = me->shared;
    un_block *kept[2] = {NULL, NULL};
    for (int round = 0; round < 6; round++) {
        un_call all = barrier();
        EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
        if (!me->rank) shared->number++;
        EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
        un_block *block = open_block(me, shared);
        arena mine = {0};
        mine.memory = un_block_part(block, me->rank, &mine.bytes);
        scenario_memory = &mine;
        scenario c = {.operation = UN_ALL_REDUCE, .type = FLOAT32, .items = 40000, .in_place = true};
        c.seed = (uint64_t)round;
        run_scenario(me, &c);
        c.operation = UN_ALL_GATHER;
        run_scenario(me, &c);
        scenario_memory = NULL;
        int at = (round + me->rank) % 2; /* every rank lets go of another one */
        if (kept[at]) un_block_release(kept[at]);
        kept[at] = block;
        EXPECT(!un_block_reopen(me->group, shared->number)); /* it is not released */
        EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
        if (me->rank) { /* rank 0 has it still */
            un_block_release(block);
            EXPECT(un_block_reopen(me->group, shared->number) == block);
        }
        EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
    }
    if (me->rank % 2) { /* after the group, too */
        un_group_close(me->group);
        me->group = NULL;
    }
    for (int i = 0; i < 2; i++)
        if (kept[i]) un_block_release(kept[i]);
}

/* -- what goes back, and when ------------------------------------------------------------------ */

static bool has_pages(char *memory, size_t bytes) {
    unsigned char pages[PART_BYTES / PAGE_BYTES];
    EXPECT(!mincore(memory, bytes, pages));
    for (size_t i = 0; i < bytes / PAGE_BYTES; i++)
        if (pages[i] & 1) return true;
    return false;
}

static bool is_mapped(membership *me, uint64_t block) {
    return address_of(me->group, me->rank, (place){.block = block}, 1);
}

/* The last release gives the memory back, though rank 1 has it mapped still; and a mapping stays as
 * long as a call may read there, whatever is released meanwhile. */
static void give_back(membership *me) {
    shared_block *shared = me->shared;
    un_call all = barrier();
    un_block *block = open_block(me, shared);
    un_block *second = NULL;
    uint64_t bytes[MOST_RANKS] = {PAGE_BYTES, PAGE_BYTES};
    int descriptor = un_block_create(me->ranks, bytes); /* which this rank alone uses */
    EXPECT_EQUAL(un_block_open(me->group, descriptor, bytes, &second), UN_OK);
    close(descriptor);
    un_block_use(second, shared->number + 1);
    size_t part_bytes;
    char *mine = un_block_part(block, me->rank, &part_bytes);
    memset(mine, 1, part_bytes);
    EXPECT(has_pages(mine, part_bytes));
    begin_reading(me->group);
    if (me->rank) un_block_release(block);
    EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
    EXPECT(has_pages(mine, part_bytes)); /* rank 0 has not released it */
    EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
    if (!me->rank) un_block_release(block);
    EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
    EXPECT(!has_pages(mine, part_bytes));
    un_block_release(second); /* looks for blocks that can go */
    EXPECT(is_mapped(me, shared->number));
    EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
    end_reading(me->group);
    EXPECT(!is_mapped(me, shared->number));
}

/* -- ends --------------------------------------------------------------------------------------- */

/* A sum of everything in this rank's part of a block. */
typedef struct large_sum {
    un_view view;
    un_stream stream;
    un_call call;
} large_sum;

static void prepare_sum(large_sum *s, un_block *block, int rank) {
    s->view = (un_view){0};
    s->view.data = un_block_part(block, rank, &s->view.bytes);
    s->stream = (un_stream){.views = &s->view, .count = 1, .bytes = s->view.bytes};
    s->call = sum_of(&s->stream);
}

/* A page of rank 0's memory at which whoever comes there is held up in the middle of its writing. */
static struct {
    char *page;
    _Atomic bool reached, left;
} obstacle;

static void be_held_up(int number, siginfo_t *facts, void *context) {
    (void)number, (void)context;
    char *at = facts->si_addr;
    EXPECT(at >= obstacle.page && at < obstacle.page + PAGE_BYTES);
    atomic_store(&obstacle.reached, true);
    while (!atomic_load(&obstacle.left)) sleep_ms(1);
    mprotect(obstacle.page, PAGE_BYTES, PROT_READ | PROT_WRITE);
}

/* Ends the group while rank 1 is held up, which goes on only when rank 0 has known that for long. */
static void *abort_and_let_go(void *argument) {
    un_group *g = argument;
    while (!atomic_load(&obstacle.reached)) sleep_ms(1);
    un_group_abort(g, "enough");
    while (!read_word(&g->calls.noticed_end)) sleep_ms(1);
    sleep_ms(20);
    atomic_store(&obstacle.left, true);
    return NULL;
}

/* The group ends while rank 1 writes its half of a sum into everybody's memory: rank 0's call is not
 * over before that has stopped. */
static void end_while_a_peer_writes(membership *me) {
    un_block *block = open_block(me, me->shared);
    un_call all = barrier();
    large_sum sum;
    prepare_sum(&sum, block, me->rank);
    memset(sum.view.data, 0, sum.view.bytes);
    pthread_t thread = {0};
    if (!me->rank) {
        obstacle.page = sum.view.data + PART_BYTES / 4 * 3;
        EXPECT(!mprotect(obstacle.page, PAGE_BYTES, PROT_NONE));
        thread = start(abort_and_let_go, me->group);
    }
    EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
    EXPECT_EQUAL(un_run(me->group, &sum.call), UN_ABORTED);
    EXPECT(atomic_load(&obstacle.left));
    if (!me->rank) join(thread);
    un_block_release(block);
}

static void test_ends(shared_block *shared) {
    struct sigaction before, handler = {.sa_sigaction = be_held_up, .sa_flags = SA_SIGINFO};
    EXPECT(!sigaction(SIGSEGV, &handler, &before));
    run_ranks(2, 4, end_while_a_peer_writes, shared);
    sigaction(SIGSEGV, &before, NULL);
}

/* Rank 1 says that what it gives lies where it cannot: so a stray pointer might have it. */
static void give_from_outside(membership *me) {
    shared_block *shared = me->shared;
    un_block *block = open_block(me, shared);
    large_sum sum;
    prepare_sum(&sum, block, me->rank);
    uint64_t call = un_group_calls(me->group) + 1;
    descriptor *mine = descriptor_of(me->group, 1, call), *theirs = descriptor_of(me->group, 0, call);
    sum.call.timeout_ns = 5 * SECOND_NS;
    if (!me->rank) {
        EXPECT_EQUAL(un_run(me->group, &sum.call), UN_DAMAGED);
    } else {
        while (atomic_load(&theirs->call) != call) sleep_ms(1);
        memcpy(mine->payload, theirs->payload, sizeof mine->payload);
        ((place *)(void *)mine->payload)->offset = shared->outside;
        write_word(&mine->signature, read_word(&theirs->signature));
        write_word(&mine->bytes, read_word(&theirs->bytes));
        write_word(&mine->hash, read_word(&theirs->hash));
        publish(me->group, &mine->call, call);
        while (!un_group_failure(me->group).status) sleep_ms(1);
    }
    EXPECT_EQUAL(un_group_failure(me->group).rank, 1);
    un_block_release(block);
}

void test_blocks(void) {
    for (int ranks = 2; ranks <= 3; ranks++) {
        static const uint64_t with[] = {~(uint64_t)0, 5, 2};
        for (int i = 0; i < 3; i++) {
            shared_block shared = {.with = with[i], .number = 1};
            run_ranks(ranks, i % 2 ? 1 : 8, run_in_block, &shared);
        }
        shared_block shared = {0};
        run_ranks(ranks, 2 * ranks, come_and_go, &shared);
    }
    shared_block shared = {.number = 1};
    run_ranks(2, 4, give_back, &shared);
    test_ends(&shared);
    static const uint64_t outside[] = {64, (uint64_t)-64, PART_BYTES + 1};
    for (int i = 0; i < 3; i++) {
        shared.outside = outside[i];
        run_ranks(2, 4, give_from_outside, &shared);
    }
}
