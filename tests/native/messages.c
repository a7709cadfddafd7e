/* Messages: every size and shape, tags, any source, more than a channel holds, several threads. */
#include <sched.h>

#include "checked_messages.h"

static const un_call forever = {.timeout_ns = -1};

/* -- checked messages -------------------------------------------------------------------------- */

static void content(const checked_message *m, int from, size_t item, char *to) {
    uint64_t key = (uint64_t)from << 56 ^ (uint64_t)m->message.tag << 40 ^ m->number << 32;
    uint64_t value = scramble(key ^ item);
    memcpy(to, &value, sizeof value);
}

void fill_message(checked_message *m, int from) {
    for (size_t item = 0; item < m->side.first[1]; item++)
        content(m, from, item, item_at(&m->side, item));
}

void prepare_message(checked_message *m, bool sends, int me, int peer, int64_t tag, size_t items,
                     enum shape shape) {
    make_side(&m->side, shape, 8, 1, &items);
    m->message = (un_message){.sends = sends,
                              .peer = peer,
                              .tag = tag,
                              .dtype = dtype_of(INT64),
                              .stream = m->side.streams[0],
                              .timeout_ns = 60 * SECOND_NS};
    m->number = 0;
    if (sends) fill_message(m, me);
}

void start_message(checked_message *m, un_group *group) {
    EXPECT_EQUAL(un_message_start(group, &m->message), UN_OK);
}

void finish_message(checked_message *m) {
    EXPECT(un_message_done(&m->message));
    EXPECT_EQUAL(m->message.status, UN_OK);
    for (size_t item = 0; !m->message.sends && item < m->side.first[1]; item++) {
        char want[8];
        content(m, m->message.source, item, want);
        EXPECT(!memcmp(item_at(&m->side, item), want, sizeof want));
    }
    free_side(&m->side);
}

void await_message(checked_message *m, un_group *group) {
    EXPECT_EQUAL(un_message_wait(group, &m->message, &forever), UN_OK);
    finish_message(m);
}

static void run_message(const membership *me, bool sends, int peer, int64_t tag, size_t items) {
    checked_message m;
    prepare_message(&m, sends, me->rank, peer, tag, items, (enum shape)(items % SHAPES));
    EXPECT_EQUAL(un_message_run(me->group, &m.message, &forever), UN_OK);
    finish_message(&m);
}

static int right_of(const membership *me) { return (me->rank + 1) % me->ranks; }
static int left_of(const membership *me) { return (me->rank + me->ranks - 1) % me->ranks; }

/* -- the tests --------------------------------------------------------------------------------- */

/* Items of 8 bytes: what fits into an entry and one more, a piece and one more, more than the
 * ring. */
static const size_t sizes[] = {0, 1, 20, 21, 511, 8192, 8193, 70001};
enum { SIZES = sizeof sizes / sizeof *sizes };

/* All sizes at once around the ring; one rank alone writes to itself. */
static void send_around(membership *me) {
    checked_message out[SIZES], in[SIZES];
    for (int i = 0; i < SIZES; i++) {
        enum shape shape = (enum shape)(i % SHAPES);
        prepare_message(&out[i], true, me->rank, right_of(me), i, sizes[i], shape);
        prepare_message(&in[i], false, me->rank, left_of(me), i, sizes[i], SHAPES - 1 - shape);
        start_message(i % 2 ? &out[i] : &in[i], me->group);
        start_message(i % 2 ? &in[i] : &out[i], me->group);
    }
    for (int i = SIZES - 1; i >= 0; i--) await_message(&in[i], me->group);
    for (int i = 0; i < SIZES; i++) await_message(&out[i], me->group);
}

/* One after the other, each in the caller's thread. */
static void send_and_wait(membership *me) {
    if (me->ranks == 1) return;
    for (int i = 0; i < SIZES; i++)
        for (int half = 0; half < 2; half++) {
            bool sends = me->rank % 2 == half;
            run_message(me, sends, sends ? right_of(me) : left_of(me), i, sizes[i]);
        }
}

/* Nobody waits: progress threads carry. */
static void send_and_drop(membership *me) {
    checked_message out[SIZES], in[SIZES];
    for (int i = 0; i < SIZES; i++) {
        prepare_message(&out[i], true, me->rank, right_of(me), 7, sizes[i], CONTIGUOUS);
        prepare_message(&in[i], false, me->rank, left_of(me), 7, sizes[i], CONTIGUOUS);
        start_message(&out[i], me->group);
        start_message(&in[i], me->group);
    }
    for (int i = 0; i < SIZES; i++) {
        while (!un_message_done(&out[i].message) || !un_message_done(&in[i].message)) sleep_ms(1);
        finish_message(&out[i]);
        finish_message(&in[i]);
    }
}

/* Everybody writes to rank 0, which takes whatever comes: from each source in order. */
static void take_from_anybody(membership *me) {
    enum { EACH = 20 };
    checked_message messages[EACH];
    for (int i = 0; i < EACH; i++) {
        prepare_message(&messages[i], true, me->rank, 0, 5, 19, CONTIGUOUS);
        messages[i].number = (uint64_t)i;
        fill_message(&messages[i], me->rank);
        start_message(&messages[i], me->group);
    }
    uint64_t seen[MOST_RANKS] = {0};
    for (int i = 0; !me->rank && i < EACH * me->ranks; i++) {
        checked_message in;
        prepare_message(&in, false, 0, -1, 5, 19, CONTIGUOUS);
        EXPECT_EQUAL(un_message_run(me->group, &in.message, &forever), UN_OK);
        in.number = seen[in.message.source]++;
        finish_message(&in);
    }
    for (int rank = 0; !me->rank && rank < me->ranks; rank++) EXPECT_EQUAL(seen[rank], EACH);
    for (int i = 0; i < EACH; i++) await_message(&messages[i], me->group);
}

/* Receives from anybody and from one rank take messages in the order in which they were started. */
static void take_in_order(membership *me) {
    enum { EACH = 6 };
    checked_message out[EACH], in[EACH];
    for (int i = 0; i < EACH; i++) {
        bool from_anybody = i % 3 == 1;
        prepare_message(&in[i], false, me->rank, from_anybody ? -1 : left_of(me), 6, 2, CONTIGUOUS);
        in[i].number = (uint64_t)i;
        start_message(&in[i], me->group);
    }
    un_call all = barrier(); /* nobody sends before all receives are there */
    EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
    for (int i = 0; i < EACH; i++) {
        prepare_message(&out[i], true, me->rank, right_of(me), 6, 2, CONTIGUOUS);
        out[i].number = (uint64_t)i;
        fill_message(&out[i], me->rank);
        start_message(&out[i], me->group);
    }
    for (int i = 0; i < EACH; i++) await_message(&in[i], me->group);
    for (int i = 0; i < EACH; i++) await_message(&out[i], me->group);
}

/* Many messages to the right and from the left, each with its tag and size, all at once. The
 * receives are started in the order of `first`, `first` + `step` and so on, which meets all. */
enum { MANY = 600 };

static void flood_once(membership *me, int64_t (*tag)(int), size_t (*items)(int), int first,
                       int step) {
    checked_message *out = calloc(MANY, sizeof *out), *in = calloc(MANY, sizeof *in);
    for (int i = 0; i < MANY; i++) {
        prepare_message(&out[i], true, me->rank, right_of(me), tag(i), items(i), CONTIGUOUS);
        start_message(&out[i], me->group);
    }
    for (int n = 0; n < MANY; n++) {
        int i = (first + n * step) % MANY;
        prepare_message(&in[i], false, me->rank, left_of(me), tag(i), items(i), CONTIGUOUS);
        start_message(&in[i], me->group);
    }
    for (int i = 0; i < MANY; i++) await_message(&in[i], me->group);
    for (int i = 0; i < MANY; i++) await_message(&out[i], me->group);
    free(out);
    free(in);
}

static int64_t few_tags(int i) { return i % 7; }
static int64_t own_tag(int i) { return i; }
static size_t up_to_240_bytes(int i) { return (size_t)(i % 30); }
static size_t eight_bytes(int i) { return i >= 0; }
static size_t some_large(int i) { return i % 50 ? 1 : 3000; }

/* More messages than a channel announces at once. */
static void flood(membership *me) { flood_once(me, few_tags, up_to_240_bytes, 0, 1); }

/* The same again and again: no answer is lost, however the ranks drift apart. */
static void flood_for_long(membership *me) {
    for (int round = 0; round < 40; round++) flood_once(me, own_tag, eight_bytes, 0, 1);
}

/* The last one is wanted first, and then in any order. */
static void reach_behind_a_flood(membership *me) {
    flood_once(me, own_tag, some_large, MANY - 1, MANY - 1);
    flood_once(me, own_tag, some_large, 317, 7);
}

/* Messages that nobody wants, many more than are kept unasked, before the one that is wanted. */
static void reach_behind_the_unwanted(membership *me) {
    enum { UNWANTED = 3000 };
    checked_message *out = calloc(UNWANTED, sizeof *out);
    for (int i = 0; i < UNWANTED; i++) {
        prepare_message(&out[i], true, me->rank, right_of(me), 1, 1, CONTIGUOUS);
        out[i].number = (uint64_t)i;
        fill_message(&out[i], me->rank);
        start_message(&out[i], me->group);
    }
    checked_message wanted, got;
    prepare_message(&wanted, true, me->rank, right_of(me), 2, 1000, CONTIGUOUS);
    prepare_message(&got, false, me->rank, left_of(me), 2, 1000, CONTIGUOUS);
    start_message(&wanted, me->group);
    start_message(&got, me->group);
    await_message(&got, me->group);
    await_message(&wanted, me->group);
    int64_t tag;
    EXPECT_EQUAL(un_group_unmatched(me->group, left_of(me), &tag), UNWANTED);
    EXPECT_EQUAL(tag, 1);
    for (int i = 0; i < UNWANTED; i++) {
        checked_message in;
        prepare_message(&in, false, me->rank, i % 2 ? -1 : left_of(me), 1, 1, CONTIGUOUS);
        in.number = (uint64_t)i;
        EXPECT_EQUAL(un_message_run(me->group, &in.message, &forever), UN_OK);
        finish_message(&in);
    }
    for (int i = 0; i < UNWANTED; i++) await_message(&out[i], me->group);
    EXPECT_EQUAL(un_group_unmatched(me->group, -1, &tag), 0);
    free(out);
}

/* Small messages may be let go before anybody takes them. */
static void send_eagerly(membership *me) {
    un_group_configure(me->group, 100, true, -1, -1);
    for (int64_t tag = 0; tag < 100; tag++) run_message(me, true, right_of(me), tag, 10);
    un_call all = barrier();
    EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
    un_group_configure(me->group, 0, true, -1, -1);
    for (int64_t tag = 99; tag >= 0; tag--) run_message(me, false, left_of(me), tag, 10);
}

typedef struct conversation { /* of two ranks' threads under a tag of their own */
    const membership *membership;
    int64_t tag;
} conversation;

static void *talk(void *argument) {
    const conversation *c = argument;
    const membership *me = c->membership;
    for (size_t i = 0; i < 60; i++) {
        size_t items = scramble(i + (uint64_t)c->tag) % (i % 20 ? 40 : 40000);
        checked_message out, in;
        prepare_message(&out, true, me->rank, right_of(me), c->tag, items, CONTIGUOUS);
        prepare_message(&in, false, me->rank, left_of(me), c->tag, items, CONTIGUOUS);
        start_message(&out, me->group);
        start_message(&in, me->group);
        un_call limit = {.timeout_ns = 100 * 1000};
        if (i % 3) un_message_wait(me->group, &out.message, &limit);
        await_message(&in, me->group);
        await_message(&out, me->group);
    }
    return NULL;
}

/* Several threads of each rank talk at once, and collectives go on beside them. */
static void talk_at_once(membership *me) {
    conversation conversations[3];
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        conversations[i] = (conversation){me, 1000 + i};
        threads[i] = start(talk, &conversations[i]);
    }
    for (uint64_t i = 0; i < 60; i++) run_random_scenario(me, scramble(i), 3000);
    for (int i = 0; i < 3; i++) join(threads[i]);
}

void test_messages(void) {
    static void (*const bodies[])(membership *) = {send_around, send_and_wait, send_and_drop,
                                              take_from_anybody, take_in_order, flood,
                                              flood_for_long, reach_behind_a_flood,
                                              reach_behind_the_unwanted, send_eagerly, talk_at_once};
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        run_ranks(1, 2, bodies[i], NULL);
        run_ranks(2, 4, bodies[i], NULL);
        run_ranks(4, 1, bodies[i], NULL);
    }
}
