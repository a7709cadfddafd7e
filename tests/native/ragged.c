/* Gathering tails of lengths that only their owners know: beside descriptors, in slots, and not at all. */
#include "threads.h"

static const size_t sizes[] = {0, 4, 1404, 1408, 1412, 36 * 1024, UN_MOST_ALONG, UN_MOST_ALONG + 4};
enum { SIZES = sizeof sizes / sizeof *sizes, HEAD_BYTES = 88 };

typedef struct gathering {
    un_ragged ragged;
    const membership *me;
    uint64_t (*heads)[HEAD_BYTES / 8]; /* length, call, and what fills up the rest */
    char *tails[MOST_RANKS];
    un_view views[MOST_RANKS];
    un_stream streams[MOST_RANKS];
    bool is_opened;
} gathering;

static size_t size_of(int rank, int call) {
    return sizes[scramble((uint64_t)(call * MOST_RANKS + rank)) % SIZES];
}

static char *make_tail(int rank, int call) {
    size_t bytes = size_of(rank, call);
    char *tail = malloc(bytes + 1);
    uint64_t first = scramble((uint64_t)call << 32 | (uint64_t)rank);
    for (size_t i = 0; i < bytes; i++) tail[i] = (char)(first + i * 7);
    return tail;
}

static const un_stream *open_heads(const un_ragged *ragged) {
    gathering *g = (gathering *)(uintptr_t)ragged;
    g->is_opened = true;
    for (int rank = 0; rank < g->me->ranks; rank++)
        if (g->heads[rank][0] > UN_MOST_ALONG) return NULL;
    for (int rank = 0; rank < g->me->ranks; rank++) {
        size_t bytes = g->heads[rank][0];
        g->tails[rank] = malloc(bytes + 1);
        g->views[rank] = (un_view){.data = g->tails[rank], .bytes = bytes};
        g->streams[rank] = (un_stream){.views = &g->views[rank], .count = 1, .bytes = bytes};
    }
    return g->streams;
}

static void gather(membership *me, int call) {
    gathering g = {.me = me};
    size_t bytes = size_of(me->rank, call);
    uint64_t head[HEAD_BYTES / 8] = {bytes, (uint64_t)call};
    char *tail = make_tail(me->rank, call);
    un_view head_view = {.data = (char *)head, .bytes = sizeof head};
    un_view tail_view = {.data = tail, .bytes = bytes};
    un_view row_views[MOST_RANKS];
    un_stream rows[MOST_RANKS];
    g.heads = malloc((size_t)me->ranks * sizeof head);
    for (int rank = 0; rank < me->ranks; rank++) {
        row_views[rank] = (un_view){.data = (char *)g.heads[rank], .bytes = sizeof head};
        rows[rank] = (un_stream){.views = &row_views[rank], .count = 1, .bytes = sizeof head};
    }
    g.ragged = (un_ragged){
        .head = {.views = &head_view, .count = 1, .bytes = sizeof head},
        .tail = {.views = &tail_view, .count = 1, .bytes = bytes},
        .comes_along = bytes <= UN_MOST_ALONG,
        .heads = rows,
        .open = open_heads,
    };
    g.ragged.call = (un_call){
        .operation = UN_ALL_GATHER, .input = &g.ragged.tail, .timeout_ns = 60 * SECOND_NS};
    EXPECT_EQUAL(un_gather_ragged(me->group, &g.ragged.call), UN_OK);
    EXPECT(g.is_opened);
    for (int rank = 0; rank < me->ranks; rank++) {
        EXPECT_EQUAL(g.heads[rank][0], size_of(rank, call));
        EXPECT_EQUAL(g.heads[rank][1], call);
        char *wanted = make_tail(rank, call);
        EXPECT(!g.tails[rank] || !memcmp(g.tails[rank], wanted, size_of(rank, call)));
        free(wanted);
        free(g.tails[rank]);
    }
    free(g.heads);
    free(tail);
}

/* One after the other, and with other calls between, which use the same descriptors and slots. */
static void gather_often(membership *me) {
    for (int call = 0; call < 30; call++) {
        gather(me, call);
        if (call % 3) continue;
        trial t;
        scenario c = random_scenario(scramble((uint64_t)call), me->ranks, 40000);
        prepare_trial(&t, &c, me->rank, me->ranks);
        EXPECT_EQUAL(un_run(me->group, &t.call), UN_OK);
        check_trial(&t);
        free_trial(&t);
    }
}

void test_ragged(void) {
    for (int ranks = 1; ranks <= 4; ranks++) run_ranks(ranks, 2 * ranks, gather_often, NULL);
    run_ranks(MOST_RANKS, 1, gather_often, NULL);
}
