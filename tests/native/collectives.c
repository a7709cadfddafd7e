/* Every collective on every number of ranks, in every shape and type, in one group and in many. */
#include <sched.h>

#include "threads.h"

/* -- one group --------------------------------------------------------------------------------- */

/* Bytes: nothing, one item, an odd few, all that fits into a descriptor and one more, what all ranks
 * combine together, a step and one more, many steps. */
static const size_t sizes[] = {0, 4, 28, 1504, 1508, 36 * 1024, 128 * 1024 + 16, 560 * 1024};
enum { SIZES = sizeof sizes / sizeof *sizes, LARGE = 36 * 1024, LARGEST = 560 * 1024 };

/* Large scenarios have large items, whose expectations take less time, and one shape each. */
static bool make_scenario(scenario *c, const membership *me, un_operation operation, size_t bytes,
                          enum shape shape, uint64_t seed) {
    bool large = bytes >= LARGE;
    bool wide = operation > UN_BROADCAST;
    int type = large ? COMPLEX128 : FLOAT32;
    *c = (scenario){.operation = operation,
                    .type = type,
                    .root = (int)(seed % (uint64_t)me->ranks),
                    .items = bytes / item_bytes_of(type) / (large && wide ? (size_t)me->ranks : 1),
                    .shape = shape,
                    .seed = seed};
    return !large || shape == (bytes / 1024 + operation + (size_t)me->ranks) % SHAPES;
}

static void run_all(membership *me) {
    uint64_t seed = 1;
    for (un_operation o = UN_BARRIER; o <= UN_ALL_TO_ALL; o++)
        for (int size = 0; size < SIZES; size++)
            for (enum shape shape = 0; shape < SHAPES; shape++) {
                scenario c;
                if (!make_scenario(&c, me, o, sizes[size], shape, seed++)) continue;
                run_scenario(me, &c);
                c.uneven = c.in_place = true;
                if (sizes[size] < LARGEST) run_scenario(me, &c);
            }
}

/* Outputs that bypass the cache. */
static void run_largest(membership *me) {
    size_t items = (4 * 1024 * 1024 + 64) / 16;
    scenario c = {.operation = UN_ALL_GATHER, .type = COMPLEX128, .items = items};
    run_scenario(me, &c);
}

/* Where each rank has cores to spare, and further threads take part. */
static void run_with_copiers(membership *me) {
    for (un_operation o = UN_ALL_REDUCE; o <= UN_ALL_TO_ALL; o++) {
        scenario c = {.operation = o,
                      .type = COMPLEX128,
                      .items = 70 * 1000 + (size_t)o,
                      .shape = (enum shape)(o % SHAPES),
                      .seed = o};
        run_scenario(me, &c);
        c.shape = 0;
        run_scenario(me, &c);
    }
}

void test_collectives(void) {
    static const int ranks[] = {1, 2, 3, 4, 8};
    for (int i = 0; i < 5; i++) run_ranks(ranks[i], i % 2 ? 1 : 2 * MOST_RANKS, run_all, NULL);
    run_ranks(2, 2, run_largest, NULL);
    run_ranks(2, 16, run_with_copiers, NULL);
}

/* -- types ------------------------------------------------------------------------------------- */

static void run_types(membership *me) {
    static const size_t items[] = {5, 1000, 12000};
    uint64_t seed = 1;
    for (int type = 0; type < TYPES; type++)
        for (un_reduction r = 0; r < UN_REDUCTIONS; r++) {
            if (!un_reducible(dtype_of(type), r)) continue;
            size_t some = items[seed % 3] * (seed % 3 == 2 && r % 4 ? 0 : 1);
            scenario c = {.operation = UN_ALL_REDUCE, .reduction = r, .type = type};
            c.items = some + 5;
            c.seed = seed++;
            c.shape = seed % SHAPES;
            c.in_place = seed & 4;
            run_scenario(me, &c);
            c.operation = UN_REDUCE_SCATTER;
            c.items = c.items / (size_t)me->ranks + 1;
            run_scenario(me, &c);
        }
}

static void run_storm(membership *me) {
    uint64_t seed = *(uint64_t *)me->shared;
    for (int i = 0; i < 120; i++) {
        if (!(scramble(seed + (uint64_t)(me->rank * 1000 + i)) % 16)) sched_yield();
        run_random_scenario(me, scramble(seed + (uint64_t)i), 12000);
    }
    EXPECT_EQUAL(un_group_calls(me->group), 120);
    EXPECT_EQUAL(un_group_failure(me->group).status, UN_OK);
}

void test_types(void) {
    for (int ranks = 1; ranks <= 3; ranks++) run_ranks(ranks, 2 * ranks, run_types, NULL);
    for (uint64_t seed = 1; seed <= 4; seed++)
        run_ranks(1 + (int)seed, seed % 2 ? 1 : 2 * MOST_RANKS, run_storm, &seed);
}

/* -- many groups ------------------------------------------------------------------------------- */

/* Four ranks that are all in one group, and by twos in two others, at once. */
typedef struct pair_groups {
    un_group *halves[2][2], *parities[2][2];
} pair_groups;

static void use_three_groups(membership *me) {
    pair_groups *pairs = me->shared;
    membership half = {pairs->halves[me->rank / 2][me->rank % 2], me->rank % 2, 2, NULL};
    membership parity = {pairs->parities[me->rank % 2][me->rank / 2], me->rank / 2, 2, NULL};
    for (uint64_t i = 0; i < 200; i++) {
        uint64_t random = scramble(i);
        const membership *chosen = random % 3 == 0 ? me : random % 3 == 1 ? &half : &parity;
        run_random_scenario(chosen, scramble(random), 5000);
    }
    un_group_close(half.group);
    un_group_close(parity.group);
}

void test_many_groups(void) {
    for (int cores = 1; cores <= 8; cores *= 8) {
        pair_groups pairs;
        for (int i = 0; i < 2; i++) {
            open_groups(2, cores, pairs.halves[i]);
            open_groups(2, cores, pairs.parities[i]);
        }
        run_ranks(4, cores, use_three_groups, &pairs);
    }
}
