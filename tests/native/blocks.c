/* Blocks: calls whose memory all ranks have mapped, and mixes of those with others. */
#include <unistd.h>

#include "threads.h"

enum { PART_BYTES = 4 * 1024 * 1024 };

typedef struct shared_block {
    un_block *first; /* rank 0's, over whose mapping the others open theirs */
    uint64_t with;   /* a bit for each rank whose tensors lie there */
    uint64_t number;
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

/* Around the limits of posts, of slots, of direct calls and of pieces. */
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
}
