/* All-reduce by programs that the caller brings: rings, stars, and everybody with everybody. */
#include "threads.h"

enum { MOST_WORDS = 4096 };

/* A program for one rank, written word by word. */
typedef struct script {
    int64_t words[MOST_WORDS], moves[MOST_WORDS];
    size_t starts, moved;
    un_program program;
} script;

static void open_script(script *s, int64_t hash, int64_t rounds, int64_t chunks, int64_t busiest) {
    const int64_t head[] = {hash, rounds, chunks, busiest, 0};
    memcpy(s->words, head, sizeof head);
    s->starts = sizeof head / sizeof *head;
    s->moved = 0;
}

static void move(script *s, un_action action, int peer, int64_t chunk, int64_t count) {
    const un_move m = {action, peer, chunk, count};
    memcpy(s->moves + 4 * s->moved++, &m, sizeof m);
}

static void end_part(script *s) { s->words[s->starts++] = (int64_t)s->moved; }

static bool close_script(script *s, int rank, int ranks) {
    memcpy(s->words + s->starts, s->moves, s->moved * sizeof(un_move));
    return un_program_read(&s->program, s->words, s->starts + 4 * s->moved, rank, ranks);
}

static void write_ring(script *s, int rank, int ranks) {
    int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
    open_script(s, 1, 2 * ranks - 2, ranks, 2 * ranks - 2);
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
static void write_star(script *s, int rank, int ranks) {
    int hub = ranks - 1;
    open_script(s, 2, 2, 1, 1);
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
static void write_crowd(script *s, int rank, int ranks) {
    open_script(s, 3, 1, 3, 3);
    for (int receives = 0; receives < 2; receives++) {
        for (int step = 1; step < ranks; step++) {
            int peer = (rank + step) % ranks;
            move(s, receives ? UN_COMBINE : UN_PUT, peer, 0, 1);
            move(s, receives ? UN_COMBINE : UN_PUT, peer, 1, 2);
        }
        end_part(s);
    }
}

static void (*const writers[])(script *, int, int) = {write_ring, write_star, write_crowd};
enum { WRITERS = sizeof writers / sizeof *writers };

/* Nothing, less than a chunk each, an odd few, one slice, a few, many. */
static const size_t sizes[] = {0, 1, 2, 7, 1001, 20000, 120001};
enum { SIZES = sizeof sizes / sizeof *sizes };

static void run_program(const place *p, const job *j, const un_program *program, bool as_work) {
    task t;
    prepare_task(&t, j, p->rank, p->ranks);
    t.call.program = program;
    if (as_work) {
        un_work work = {.call = t.call};
        const un_call patient = {.timeout_ns = -1};
        EXPECT_EQUAL(un_submit(p->group, &work), UN_OK);
        EXPECT_EQUAL(un_work_wait(p->group, &work, &patient), UN_OK);
    } else {
        EXPECT_EQUAL(un_run(p->group, &t.call), UN_OK);
    }
    check_task(&t);
    free_task(&t);
}

static void run_programs(place *p) {
    static _Thread_local script scripts[WRITERS];
    uint64_t seed = 1;
    for (int writer = 0; writer < WRITERS; writer++) {
        writers[writer](&scripts[writer], p->rank, p->ranks);
        EXPECT(close_script(&scripts[writer], p->rank, p->ranks));
    }
    for (int size = 0; size < SIZES; size++)
        for (int writer = 0; writer < WRITERS; writer++)
            for (enum shape shape = 0; shape < SHAPES; shape++) {
                job j = {.operation = UN_ALL_REDUCE, .items = sizes[size], .shape = shape};
                j.seed = seed++;
                j.in_place = seed & 1;
                j.type = (int)(seed % (TYPES - 1));
                j.reduction = (un_reduction)(seed / 3 % UN_REDUCTIONS);
                while (!un_reducible(dtype_of(j.type), j.reduction))
                    j.reduction = (j.reduction + 1) % UN_REDUCTIONS;
                if (sizes[size] > 10000 && shape != seed % SHAPES) continue;
                run_program(p, &j, &scripts[writer].program, seed & 2);
                if (seed % 7 == 0) run_random_job(p, scramble(seed / 7), 3000); /* in between */
            }
}

/* One way only: nothing but the room in the tube keeps the sender from running ahead. */
static void run_one_way(place *p) {
    static _Thread_local script s;
    enum { ITEMS = 1500000 };
    uint32_t *numbers = malloc(ITEMS * sizeof *numbers);
    for (size_t i = 0; i < ITEMS; i++) numbers[i] = p->rank ? 0 : (uint32_t)i;
    un_view view = {.data = (char *)numbers, .bytes = ITEMS * sizeof *numbers};
    un_stream stream = {.views = &view, .count = 1, .bytes = view.bytes};
    open_script(&s, 4, 1, 1, 1);
    if (!p->rank) move(&s, UN_PUT, 1, 0, 1);
    end_part(&s);
    if (p->rank) move(&s, UN_COPY, 0, 0, 1);
    end_part(&s);
    EXPECT(close_script(&s, p->rank, p->ranks));
    un_call call = sum_of(&stream);
    call.program = &s.program;
    EXPECT_EQUAL(un_run(p->group, &call), UN_OK);
    for (size_t i = 0; i < ITEMS; i++) EXPECT(numbers[i] == i);
    free(numbers);
}

/* -- endings ----------------------------------------------------------------------------------- */

static void run_other_programs(place *p) {
    static _Thread_local script s;
    writers[p->rank == 1 ? 1 : 0](&s, p->rank, p->ranks);
    EXPECT(close_script(&s, p->rank, p->ranks));
    job j = {.operation = UN_ALL_REDUCE, .type = FLOAT32, .items = 1000, .in_place = true};
    task t;
    prepare_task(&t, &j, p->rank, p->ranks);
    t.call.program = p->rank == 2 ? NULL : &s.program;
    EXPECT_EQUAL(un_run(p->group, &t.call), UN_MISMATCH);
    free_task(&t);
}

/* The last rank takes part in the meeting but not in the program: a round of it is missing. */
static void run_half_a_program(place *p) {
    static _Thread_local script s;
    write_star(&s, p->rank, p->ranks);
    if (p->rank == p->ranks - 1) {
        open_script(&s, 2, 2, 1, 1);
        for (int part = 0; part < 4; part++) end_part(&s);
    }
    EXPECT(close_script(&s, p->rank, p->ranks));
    job j = {.operation = UN_ALL_REDUCE, .type = FLOAT32, .items = 500000, .in_place = true};
    task t;
    prepare_task(&t, &j, p->rank, p->ranks);
    t.call.program = &s.program;
    bool closes = *(bool *)p->shared;
    t.call.timeout_ns = closes ? 60 * SECOND_NS : 100 * MILLISECOND_NS;
    un_status status = un_run(p->group, &t.call);
    if (p->rank == p->ranks - 1 && !closes) { /* it may also come too late for the meeting */
        EXPECT(status == UN_OK || status == UN_TIMEOUT);
        while (!un_group_failure(p->group).status) sleep_ms(1);
    } else if (p->rank < p->ranks - 1) {
        EXPECT_EQUAL(status, closes ? UN_PEER_CLOSED : UN_TIMEOUT);
    }
    free_task(&t);
}

/* Words that make no sense must be refused, whatever they are. */
static void refuse_nonsense(void) {
    script s;
    write_ring(&s, 1, 3);
    EXPECT(close_script(&s, 1, 3));
    size_t count = s.starts + 4 * s.moved;
    for (size_t less = 1; less < count; less++)
        EXPECT(!un_program_read(&s.program, s.words, count - less, 1, 3));
    EXPECT(!un_program_read(&s.program, s.words, count, 2, 3)); /* a move to itself */
    for (size_t word = 1; word < count; word++) {
        int64_t before = s.words[word];
        s.words[word] = INT64_MIN;
        EXPECT(!un_program_read(&s.program, s.words, count, 1, 3));
        s.words[word] = INT64_MAX;
        EXPECT(!un_program_read(&s.program, s.words, count, 1, 3));
        s.words[word] = before;
    }
    EXPECT(un_program_read(&s.program, s.words, count, 1, 3));
}

void test_programs(void) {
    static const int ranks[] = {2, 3, 4, 5, 8};
    for (int i = 0; i < 5; i++) run_ranks(ranks[i], i % 2 ? 1 : 2 * MOST_RANKS, run_programs, NULL);
    run_ranks(2, 1, run_one_way, NULL);
    run_ranks(2, 4, run_one_way, NULL);
    refuse_nonsense();
    run_ranks(3, 2, run_other_programs, NULL);
    for (int closes = 0; closes < 2; closes++) {
        bool shared = closes;
        run_ranks(3, closes ? 1 : 8, run_half_a_program, &shared);
    }
}
