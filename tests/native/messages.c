/* Messages: every size and shape, tags, any source, more than a channel holds, several threads. */
#include <sched.h>

#include "checked_messages.h"

static const un_call forever = {.timeout_ns = -1};

/* -- letters ----------------------------------------------------------------------------------- */

static void content(const letter *l, int from, size_t item, char *to) {
    uint64_t letter = (uint64_t)from << 56 ^ (uint64_t)l->message.tag << 40 ^ l->number << 32;
    uint64_t value = scramble(letter ^ item);
    memcpy(to, &value, sizeof value);
}

void write_letter(letter *l, int from) {
    for (size_t item = 0; item < l->side.first[1]; item++)
        content(l, from, item, item_at(&l->side, item));
}

void prepare_letter(letter *l, bool sends, int me, int peer, int64_t tag, size_t items,
                    enum shape shape) {
    make_side(&l->side, shape, 8, 1, &items);
    l->message = (un_message){.sends = sends,
                              .peer = peer,
                              .tag = tag,
                              .dtype = dtype_of(INT64),
                              .stream = l->side.streams[0],
                              .timeout_ns = 60 * SECOND_NS};
    l->number = 0;
    if (sends) write_letter(l, me);
}

void start_letter(letter *l, un_group *group) {
    EXPECT_EQUAL(un_message_start(group, &l->message), UN_OK);
}

void finish_letter(letter *l) {
    EXPECT(un_message_done(&l->message));
    EXPECT_EQUAL(l->message.status, UN_OK);
    for (size_t item = 0; !l->message.sends && item < l->side.first[1]; item++) {
        char want[8];
        content(l, l->message.source, item, want);
        EXPECT(!memcmp(item_at(&l->side, item), want, sizeof want));
    }
    free_side(&l->side);
}

void await_letter(letter *l, un_group *group) {
    EXPECT_EQUAL(un_message_wait(group, &l->message, &forever), UN_OK);
    finish_letter(l);
}

static void run_letter(const place *p, bool sends, int peer, int64_t tag, size_t items) {
    letter l;
    prepare_letter(&l, sends, p->rank, peer, tag, items, (enum shape)(items % SHAPES));
    EXPECT_EQUAL(un_message_run(p->group, &l.message, &forever), UN_OK);
    finish_letter(&l);
}

static int right_of(const place *p) { return (p->rank + 1) % p->ranks; }
static int left_of(const place *p) { return (p->rank + p->ranks - 1) % p->ranks; }

/* -- the tests --------------------------------------------------------------------------------- */

/* Items of 8 bytes: what fits into an entry and one more, a piece and one more, more than the
 * ring. */
static const size_t sizes[] = {0, 1, 20, 21, 511, 8192, 8193, 70001};
enum { SIZES = sizeof sizes / sizeof *sizes };

/* All sizes at once around the ring; one rank alone writes to itself. */
static void send_around(place *p) {
    letter out[SIZES], in[SIZES];
    for (int i = 0; i < SIZES; i++) {
        enum shape shape = (enum shape)(i % SHAPES);
        prepare_letter(&out[i], true, p->rank, right_of(p), i, sizes[i], shape);
        prepare_letter(&in[i], false, p->rank, left_of(p), i, sizes[i], SHAPES - 1 - shape);
        start_letter(i % 2 ? &out[i] : &in[i], p->group);
        start_letter(i % 2 ? &in[i] : &out[i], p->group);
    }
    for (int i = SIZES - 1; i >= 0; i--) await_letter(&in[i], p->group);
    for (int i = 0; i < SIZES; i++) await_letter(&out[i], p->group);
}

/* One after the other, each in the caller's thread. */
static void send_and_wait(place *p) {
    if (p->ranks == 1) return;
    for (int i = 0; i < SIZES; i++)
        for (int half = 0; half < 2; half++) {
            bool sends = p->rank % 2 == half;
            run_letter(p, sends, sends ? right_of(p) : left_of(p), i, sizes[i]);
        }
}

/* Nobody waits: couriers carry. */
static void send_and_drop(place *p) {
    letter out[SIZES], in[SIZES];
    for (int i = 0; i < SIZES; i++) {
        prepare_letter(&out[i], true, p->rank, right_of(p), 7, sizes[i], CONTIGUOUS);
        prepare_letter(&in[i], false, p->rank, left_of(p), 7, sizes[i], CONTIGUOUS);
        start_letter(&out[i], p->group);
        start_letter(&in[i], p->group);
    }
    for (int i = 0; i < SIZES; i++) {
        while (!un_message_done(&out[i].message) || !un_message_done(&in[i].message)) sleep_ms(1);
        finish_letter(&out[i]);
        finish_letter(&in[i]);
    }
}

/* Everybody writes to rank 0, which takes whatever comes: from each source in order. */
static void take_from_anybody(place *p) {
    enum { EACH = 20 };
    letter letters[EACH];
    for (int i = 0; i < EACH; i++) {
        prepare_letter(&letters[i], true, p->rank, 0, 5, 19, CONTIGUOUS);
        letters[i].number = (uint64_t)i;
        write_letter(&letters[i], p->rank);
        start_letter(&letters[i], p->group);
    }
    uint64_t seen[MOST_RANKS] = {0};
    for (int i = 0; !p->rank && i < EACH * p->ranks; i++) {
        letter in;
        prepare_letter(&in, false, 0, -1, 5, 19, CONTIGUOUS);
        EXPECT_EQUAL(un_message_run(p->group, &in.message, &forever), UN_OK);
        in.number = seen[in.message.source]++;
        finish_letter(&in);
    }
    for (int rank = 0; !p->rank && rank < p->ranks; rank++) EXPECT_EQUAL(seen[rank], EACH);
    for (int i = 0; i < EACH; i++) await_letter(&letters[i], p->group);
}

/* Many letters to the right and from the left, each with its tag and size, all at once. The
 * receives are started in the order of `first`, `first` + `step` and so on, which meets all. */
enum { MANY = 600 };

static void flood_once(place *p, int64_t (*tag)(int), size_t (*items)(int), int first, int step) {
    letter *out = calloc(MANY, sizeof *out), *in = calloc(MANY, sizeof *in);
    for (int i = 0; i < MANY; i++) {
        prepare_letter(&out[i], true, p->rank, right_of(p), tag(i), items(i), CONTIGUOUS);
        start_letter(&out[i], p->group);
    }
    for (int n = 0; n < MANY; n++) {
        int i = (first + n * step) % MANY;
        prepare_letter(&in[i], false, p->rank, left_of(p), tag(i), items(i), CONTIGUOUS);
        start_letter(&in[i], p->group);
    }
    for (int i = 0; i < MANY; i++) await_letter(&in[i], p->group);
    for (int i = 0; i < MANY; i++) await_letter(&out[i], p->group);
    free(out);
    free(in);
}

static int64_t few_tags(int i) { return i % 7; }
static int64_t own_tag(int i) { return i; }
static size_t up_to_240_bytes(int i) { return (size_t)(i % 30); }
static size_t eight_bytes(int i) { return i >= 0; }
static size_t some_large(int i) { return i % 50 ? 1 : 3000; }

/* More messages than a channel announces at once. */
static void flood(place *p) { flood_once(p, few_tags, up_to_240_bytes, 0, 1); }

/* The same again and again: no answer is lost, however the ranks drift apart. */
static void flood_for_long(place *p) {
    for (int round = 0; round < 40; round++) flood_once(p, own_tag, eight_bytes, 0, 1);
}

/* The last one is wanted first, and then in any order. */
static void reach_behind_a_flood(place *p) {
    flood_once(p, own_tag, some_large, MANY - 1, MANY - 1);
    flood_once(p, own_tag, some_large, 317, 7);
}

/* Messages that nobody wants, many more than are kept unasked, before the one that is wanted. */
static void reach_behind_the_unwanted(place *p) {
    enum { UNWANTED = 3000 };
    letter *out = calloc(UNWANTED, sizeof *out);
    for (int i = 0; i < UNWANTED; i++) {
        prepare_letter(&out[i], true, p->rank, right_of(p), 1, 1, CONTIGUOUS);
        out[i].number = (uint64_t)i;
        write_letter(&out[i], p->rank);
        start_letter(&out[i], p->group);
    }
    letter wanted, got;
    prepare_letter(&wanted, true, p->rank, right_of(p), 2, 1000, CONTIGUOUS);
    prepare_letter(&got, false, p->rank, left_of(p), 2, 1000, CONTIGUOUS);
    start_letter(&wanted, p->group);
    start_letter(&got, p->group);
    await_letter(&got, p->group);
    await_letter(&wanted, p->group);
    int64_t tag;
    EXPECT_EQUAL(un_group_unmatched(p->group, left_of(p), &tag), UNWANTED);
    EXPECT_EQUAL(tag, 1);
    for (int i = 0; i < UNWANTED; i++) {
        letter in;
        prepare_letter(&in, false, p->rank, i % 2 ? -1 : left_of(p), 1, 1, CONTIGUOUS);
        in.number = (uint64_t)i;
        EXPECT_EQUAL(un_message_run(p->group, &in.message, &forever), UN_OK);
        finish_letter(&in);
    }
    for (int i = 0; i < UNWANTED; i++) await_letter(&out[i], p->group);
    EXPECT_EQUAL(un_group_unmatched(p->group, -1, &tag), 0);
    free(out);
}

/* Small messages may be let go before anybody takes them. */
static void send_eagerly(place *p) {
    un_group_set_eager(p->group, 100);
    for (int64_t tag = 0; tag < 100; tag++) run_letter(p, true, right_of(p), tag, 10);
    un_call all = barrier();
    EXPECT_EQUAL(un_run(p->group, &all), UN_OK);
    un_group_set_eager(p->group, 0);
    for (int64_t tag = 99; tag >= 0; tag--) run_letter(p, false, left_of(p), tag, 10);
}

typedef struct line { /* two ranks' threads that write to each other under a tag of their own */
    const place *place;
    int64_t tag;
} line;

static void *talk(void *argument) {
    const line *l = argument;
    const place *p = l->place;
    for (size_t i = 0; i < 60; i++) {
        size_t items = scramble(i + (uint64_t)l->tag) % (i % 20 ? 40 : 40000);
        letter out, in;
        prepare_letter(&out, true, p->rank, right_of(p), l->tag, items, CONTIGUOUS);
        prepare_letter(&in, false, p->rank, left_of(p), l->tag, items, CONTIGUOUS);
        start_letter(&out, p->group);
        start_letter(&in, p->group);
        un_call limit = {.timeout_ns = 100 * 1000};
        if (i % 3) un_message_wait(p->group, &out.message, &limit);
        await_letter(&in, p->group);
        await_letter(&out, p->group);
    }
    return NULL;
}

/* Several threads of each rank talk at once, and collectives go on beside them. */
static void talk_at_once(place *p) {
    line lines[3];
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        lines[i] = (line){p, 1000 + i};
        threads[i] = start(talk, &lines[i]);
    }
    for (uint64_t i = 0; i < 60; i++) run_random_job(p, scramble(i), 3000);
    for (int i = 0; i < 3; i++) join(threads[i]);
}

void test_messages(void) {
    static void (*const bodies[])(place *) = {send_around, send_and_wait, send_and_drop,
                                              take_from_anybody, flood, flood_for_long,
                                              reach_behind_a_flood, reach_behind_the_unwanted,
                                              send_eagerly, talk_at_once};
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        run_ranks(1, 2, bodies[i], NULL);
        run_ranks(2, 4, bodies[i], NULL);
        run_ranks(4, 1, bodies[i], NULL);
    }
}
