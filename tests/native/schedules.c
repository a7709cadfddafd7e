/* all_reduce by schedules that the caller passes: rings, stars, and everybody with everybody. */
#include "threads.h"

enum { MOST_INTEGERS = 4096 };

/* A compiled schedule for one rank, as it is written. */
typedef struct draft {
    int64_t integers[MOST_INTEGERS], moves[MOST_INTEGERS];
    size_t starts, moved;
    un_compiled_schedule schedule;
} draft;

static void begin_draft(draft *s, int64_t hash, int64_t rounds, int64_t chunks, int64_t busiest) {
    const int64_t head[] = {hash, rounds, chunks, busiest, 0};
    memcpy(s->integers, head, sizeof head);
    s->starts = sizeof head / sizeof *head;
    s->moved = 0;
}

static void move(draft *s, un_action action, int peer, int64_t chunk, int64_t count) {
    const un_move m = {action, peer, chunk, count};
    memcpy(s->moves + 4 * s->moved++, &m, sizeof m);
}

static void end_part(draft *s) { s->integers[s->starts++] = (int64_t)s->moved; }

static bool compile_draft(draft *s, int rank, int ranks) {
    memcpy(s->integers + s->starts, s->moves, s->moved * sizeof(un_move));
    return un_schedule_read(&s->schedule, s->integers, s->starts + 4 * s->moved, rank, ranks);
}

static void write_ring(draft *s, int rank, int ranks) {
    int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
    begin_draft(s, 1, 2 * ranks - 2, ranks, 2 * ranks - 2);
    for (int round = 0; round < 2 * ranks - 2; round++) {
        bool sums = round < ranks - 1;
        int chunk = (rank - (sums ? 1 : 0) - round % (ranks - 1) + 2 * ranks) % ranks;
        move(s, UN_PUT, next, chunk, 1);
        end_part(s);
        move(s, sums ? UN_COMBINE : UN_COPY, before, (chunk + ranks - 1) % ranks, 1);
        end_part(s);
    }
}

/* Everything to the last rank, and back. Only one chunk, so that slices make the pipeline. */
static void write_star(draft *s, int rank, int ranks) {
    int hub = ranks - 1;
    begin_draft(s, 2, 2, 1, 1);
    for (int round = 0; round < 2; round++) {
        bool sends = (rank == hub) == (round == 1);
        for (int peer = 0; sends && peer < ranks; peer++)
            if (rank != peer && (rank == hub || peer == hub)) move(s, UN_PUT, peer, 0, 1);
        end_part(s);
        for (int peer = 0; !sends && peer < ranks; peer++)
            if (rank != peer && (rank == hub || peer == hub))
                move(s, round ? UN_COPY : UN_COMBINE, peer, 0, 1);
        end_part(s);
    }
}

/* Everybody sends all it has before it adds what it gets; in three chunks, two of them together. */
static void write_crowd(draft *s, int rank, int ranks) {
    begin_draft(s, 3, 1, 3, 3);
    for (int receives = 0; receives < 2; receives++) {
        for (int step = 1; step < ranks; step++) {
            int peer = (rank + step) % ranks;
            move(s, receives ? UN_COMBINE : UN_PUT, peer, 0, 1);
            move(s, receives ? UN_COMBINE : UN_PUT, peer, 1, 2);
        }
        end_part(s);
    }
}

static void (*const writers[])(draft *, int, int) = {write_ring, write_star, write_crowd};
enum { WRITERS = sizeof writers / sizeof *writers };

/* Nothing, less than a chunk each, an odd few, one slice, a few, many. */
static const size_t sizes[] = {0, 1, 2, 7, 1001, 20000, 120001};
enum { SIZES = sizeof sizes / sizeof *sizes };

static void run_schedule(const membership *me, const scenario *c,
                         const un_compiled_schedule *schedule, bool as_work) {
    trial t;
    prepare_trial(&t, c, me->rank, me->ranks);
    t.call.schedule = schedule;
    if (as_work) {
        un_work work = {.call = t.call};
        const un_call patient = {.timeout_ns = -1};
        EXPECT_EQUAL(un_submit(me->group, &work), UN_OK);
        EXPECT_EQUAL(un_work_wait(me->group, &work, &patient), UN_OK);
    } else {
        EXPECT_EQUAL(un_run(me->group, &t.call), UN_OK);
    }
    check_trial(&t);
    free_trial(&t);
}

static void run_schedules(membership *me) {
    static _Thread_local draft drafts[WRITERS];
    uint64_t seed = 1;
    for (int writer = 0; writer < WRITERS; writer++) {
        writers[writer](&drafts[writer], me->rank, me->ranks);
        EXPECT(compile_draft(&drafts[writer], me->rank, me->ranks));
    }
    for (int size = 0; size < SIZES; size++)
        for (int writer = 0; writer < WRITERS; writer++)
            for (enum shape shape = 0; shape < SHAPES; shape++) {
                scenario c = {.operation = UN_ALL_REDUCE, .items = sizes[size], .shape = shape};
                c.seed = seed++;
                c.in_place = seed & 1;
                c.type = (int)(seed % (TYPES - 1));
                c.reduction = (un_reduction)(seed / 3 % UN_REDUCTIONS);
                while (!un_reducible(dtype_of(c.type), c.reduction))
                    c.reduction = (c.reduction + 1) % UN_REDUCTIONS;
                if (sizes[size] > 10000 && shape != seed % SHAPES) continue;
                run_schedule(me, &c, &drafts[writer].schedule, seed & 2);
                if (seed % 7 == 0) /* in between */
                    run_random_scenario(me, scramble(seed / 7), 3000);
            }
}

/* One way only: nothing but the room in the FIFO keeps the sender from running ahead. */
static void run_one_way(membership *me) {
    static _Thread_local draft s;
    enum { ITEMS = 1500000 };
    uint32_t *numbers = malloc(ITEMS * sizeof *numbers);
    for (size_t i = 0; i < ITEMS; i++) numbers[i] = me->rank ? 0 : (uint32_t)i;
    un_view view = {.data = (char *)numbers, .bytes = ITEMS * sizeof *numbers};
    un_stream stream = {.views = &view, .count = 1, .bytes = view.bytes};
    begin_draft(&s, 4, 1, 1, 1);
    if (!me->rank) move(&s, UN_PUT, 1, 0, 1);
    end_part(&s);
    if (me->rank) move(&s, UN_COPY, 0, 0, 1);
    end_part(&s);
    EXPECT(compile_draft(&s, me->rank, me->ranks));
    un_call call = sum_of(&stream);
    call.schedule = &s.schedule;
    EXPECT_EQUAL(un_run(me->group, &call), UN_OK);
    for (size_t i = 0; i < ITEMS; i++) EXPECT(numbers[i] == i);
    free(numbers);
}

/* -- endings ----------------------------------------------------------------------------------- */

static void run_different_schedules(membership *me) {
    static _Thread_local draft s;
    writers[me->rank == 1 ? 1 : 0](&s, me->rank, me->ranks);
    EXPECT(compile_draft(&s, me->rank, me->ranks));
    scenario c = {.operation = UN_ALL_REDUCE, .type = FLOAT32, .items = 1000, .in_place = true};
    trial t;
    prepare_trial(&t, &c, me->rank, me->ranks);
    t.call.schedule = me->rank == 2 ? NULL : &s.schedule;
    EXPECT_EQUAL(un_run(me->group, &t.call), UN_MISMATCH);
    free_trial(&t);
}

/* The last rank takes part in the meeting but not in the schedule: a round of it is missing. */
static void run_half_a_schedule(membership *me) {
    static _Thread_local draft s;
    write_star(&s, me->rank, me->ranks);
    if (me->rank == me->ranks - 1) {
        begin_draft(&s, 2, 2, 1, 1);
        for (int part = 0; part < 4; part++) end_part(&s);
    }
    EXPECT(compile_draft(&s, me->rank, me->ranks));
    scenario c = {.operation = UN_ALL_REDUCE, .type = FLOAT32, .items = 500000, .in_place = true};
    trial t;
    prepare_trial(&t, &c, me->rank, me->ranks);
    t.call.schedule = &s.schedule;
    bool closes = *(bool *)me->shared;
    t.call.timeout_ns = closes ? 60 * SECOND_NS : 100 * MILLISECOND_NS;
    un_status status = un_run(me->group, &t.call);
    if (me->rank == me->ranks - 1 && !closes) { /* it may also come too late for the meeting */
        EXPECT(status == UN_OK || status == UN_TIMEOUT);
        while (!un_group_failure(me->group).status) sleep_ms(1);
    } else if (me->rank < me->ranks - 1) {
        EXPECT_EQUAL(status, closes ? UN_PEER_CLOSED : UN_TIMEOUT);
    }
    free_trial(&t);
}

/* Invalid integers must be rejected, whatever they are. */
static void refuse_nonsense(void) {
    draft s;
    write_ring(&s, 1, 3);
    EXPECT(compile_draft(&s, 1, 3));
    size_t count = s.starts + 4 * s.moved;
    for (size_t less = 1; less < count; less++)
        EXPECT(!un_schedule_read(&s.schedule, s.integers, count - less, 1, 3));
    EXPECT(!un_schedule_read(&s.schedule, s.integers, count, 2, 3)); /* a move to itself */
    for (size_t i = 1; i < count; i++) {
        int64_t before = s.integers[i];
        s.integers[i] = INT64_MIN;
        EXPECT(!un_schedule_read(&s.schedule, s.integers, count, 1, 3));
        s.integers[i] = INT64_MAX;
        EXPECT(!un_schedule_read(&s.schedule, s.integers, count, 1, 3));
        s.integers[i] = before;
    }
    EXPECT(un_schedule_read(&s.schedule, s.integers, count, 1, 3));
}

void test_schedules(void) {
    static const int ranks[] = {2, 3, 4, 5, 8};
    for (int i = 0; i < 5; i++)
        run_ranks(ranks[i], i % 2 ? 1 : 2 * MOST_RANKS, run_schedules, NULL);
    run_ranks(2, 1, run_one_way, NULL);
    run_ranks(2, 4, run_one_way, NULL);
    refuse_nonsense();
    run_ranks(3, 2, run_different_schedules, NULL);
    for (int closes = 0; closes < 2; closes++) {
        bool shared = closes;
        run_ranks(3, closes ? 1 : 8, run_half_a_schedule, &shared);
    }
}
