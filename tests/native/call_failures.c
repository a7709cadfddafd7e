/* Calls that end badly: mismatches, refusals, aborts, deadlines, interrupts, peers that leave. */
#include "threads.h"

static void expect_end(const place *p, un_status status) {
    un_failure failure = un_group_failure(p->group);
    EXPECT_EQUAL(failure.status, status);
    uint64_t calls = un_group_calls(p->group);
    un_call all = barrier();
    un_work work = {.call = all};
    EXPECT_EQUAL(un_run(p->group, &all), status);
    EXPECT_EQUAL(un_submit(p->group, &work), UN_OK);
    const un_call forever = {.timeout_ns = -1};
    EXPECT_EQUAL(un_work_wait(p->group, &work, &forever), status);
    EXPECT_EQUAL(un_group_calls(p->group), calls);
    EXPECT_EQUAL(un_group_failure(p->group).call, failure.call);
}

static void wait_for_failure(const place *p) {
    while (!un_group_failure(p->group).status) sleep_ms(1);
}

/* -- what the ranks do not agree on ------------------------------------------------------------ */

/* The last rank does something else; nobody's output changes, and everybody can tell who did. */
static void disagree(place *p) {
    const job *jobs = p->shared;
    bool other = p->rank == p->ranks - 1;
    run_random_job(p, 1, 100);
    task t;
    prepare_task(&t, &jobs[other], p->rank, p->ranks);
    EXPECT_EQUAL(un_run(p->group, &t.call), UN_MISMATCH);
    EXPECT(!t.output.memory || t.job.in_place || side_is_untouched(&t.output));
    free_task(&t);
    un_failure failure = un_group_failure(p->group);
    EXPECT_EQUAL(failure.call, 2);
    for (int rank = 0; rank < p->ranks; rank++) {
        un_posted posted = un_group_posted(p->group, rank, failure.call);
        const job *theirs = &jobs[rank == p->ranks - 1];
        EXPECT_EQUAL(posted.call, 2);
        EXPECT_EQUAL(posted.operation, theirs->operation);
        EXPECT_EQUAL(posted.root, theirs->root);
        EXPECT_EQUAL(posted.dtype, dtype_of(theirs->type));
    }
    expect_end(p, UN_MISMATCH);
}

static void test_mismatches(void) {
    job usual = {.operation = UN_ALL_REDUCE, .type = FLOAT32, .items = 100};
    for (int change = 0; change < 7; change++) {
        job jobs[2] = {usual, usual};
        if (change == 0) jobs[1].operation = UN_BROADCAST;
        if (change == 1) jobs[1].reduction = UN_MAX;
        if (change == 2) jobs[1].type = INT64;
        if (change == 3) jobs[1].items = 99;
        if (change > 3) jobs[0].operation = jobs[1].operation = UN_ALL_TO_ALL;
        if (change == 4) jobs[1].items = 20000;
        if (change == 5) jobs[0].items = 20000;
        if (change == 6) jobs[0].operation = jobs[1].operation = UN_GATHER, jobs[1].root = 1;
        run_ranks(2 + change % 3, change % 2 ? 1 : 8, disagree, jobs);
    }
}

/* -- refusals ---------------------------------------------------------------------------------- */

/* All refuse alike, by their arguments or by the engine's own judgement: the group goes on. */
static void refuse_together(place *p) {
    int64_t data[2] = {p->rank, 1};
    un_view view = {.data = (char *)data, .bytes = sizeof data};
    un_stream stream = {.views = &view, .count = 1, .bytes = sizeof data};
    un_call average = sum_of(&stream);
    average.reduction = UN_AVG;
    average.dtype = dtype_of(INT64);
    for (int i = 0; i < 10; i++) {
        EXPECT_EQUAL(i % 2 ? un_run(p->group, &average) : un_refuse(p->group, &average),
                     UN_REFUSED);
        EXPECT(data[0] == p->rank && data[1] == 1);
        run_random_job(p, scramble((uint64_t)i), 3000);
    }
}

static void refuse_alone(place *p) {
    un_call all = barrier();
    if (p->rank)
        EXPECT_EQUAL(un_run(p->group, &all), UN_MISMATCH);
    else
        EXPECT_EQUAL(un_refuse(p->group, &all), UN_REFUSED);
    EXPECT(un_group_posted(p->group, 0, 1).refused);
    EXPECT(!un_group_posted(p->group, 1, 1).refused);
    expect_end(p, UN_MISMATCH);
}

/* -- aborts ------------------------------------------------------------------------------------ */

typedef struct bomb {
    un_group *group;
    int delay_ms;
} bomb;

static void *abort_later(void *argument) {
    const bomb *b = argument;
    sleep_ms(b->delay_ms);
    un_group_abort(b->group, "enough");
    return NULL;
}

/* In the middle of calls and works; whatever was over before is as it should be. */
static void be_aborted(place *p) {
    int round = *(int *)p->shared;
    bomb b = {p->group, 1 + round};
    pthread_t thread = {0};
    if (p->rank == p->ranks - 1) thread = start(abort_later, &b);
    const un_call forever = {.timeout_ns = -1};
    un_status status = UN_OK;
    for (uint64_t i = 0; !status; i++) {
        job j = random_job(scramble(i + (uint64_t)round * 1000), p->ranks, 20000);
        task t;
        prepare_task(&t, &j, p->rank, p->ranks);
        un_work work = {.call = t.call};
        if (i % 2) {
            status = un_run(p->group, &t.call);
        } else {
            EXPECT_EQUAL(un_submit(p->group, &work), UN_OK);
            status = un_work_wait(p->group, &work, &forever);
        }
        if (!status) check_task(&t);
        free_task(&t);
    }
    EXPECT_EQUAL(status, UN_ABORTED);
    EXPECT_EQUAL(un_group_failure(p->group).rank, p->ranks - 1);
    if (p->rank == p->ranks - 1) join(thread);
    expect_end(p, UN_ABORTED);
}

/* -- deadlines, interrupts, departures --------------------------------------------------------- */

static void run_out_of_time(place *p) {
    un_call all = barrier();
    all.timeout_ns = 100 * MILLISECOND_NS;
    if (p->rank)
        wait_for_failure(p);
    else
        EXPECT_EQUAL(un_run(p->group, &all), UN_TIMEOUT);
    EXPECT_EQUAL(un_group_failure(p->group).rank, 1);
    expect_end(p, UN_TIMEOUT);
}

static int stop(void *argument) {
    int *pauses = argument;
    return ++*pauses == 2;
}

/* In a call, in a work that the waiting thread runs itself, and in one that the worker runs. */
static void be_interrupted(place *p) {
    int way = *(int *)p->shared, pauses = 0;
    un_call all = barrier();
    un_call hooks = {.timeout_ns = way == 2 ? 30 * SECOND_NS : -1,
                     .pause = stop,
                     .argument = &pauses};
    un_work work = {.call = all};
    if (p->rank) {
        wait_for_failure(p);
    } else if (way) {
        EXPECT_EQUAL(un_submit(p->group, &work), UN_OK);
        EXPECT_EQUAL(un_work_wait(p->group, &work, &hooks), UN_INTERRUPTED);
        hooks.pause = NULL;
        EXPECT_EQUAL(un_work_wait(p->group, &work, &hooks), UN_INTERRUPTED);
    } else {
        all.pause = stop;
        all.argument = &pauses;
        EXPECT_EQUAL(un_run(p->group, &all), UN_INTERRUPTED);
    }
    expect_end(p, p->rank ? UN_ABORTED : UN_INTERRUPTED);
}

static int call_again(void *argument) {
    un_call all = barrier();
    EXPECT_EQUAL(un_run(argument, &all), UN_REENTERED);
    return 0;
}

/* A pause that calls into its own group, as a signal handler might. */
static void reenter(place *p) {
    un_call all = barrier();
    all.pause = call_again;
    all.argument = p->group;
    if (p->rank) sleep_ms(150);
    EXPECT_EQUAL(un_run(p->group, &all), UN_OK);
}

static void *run_barriers(void *argument) {
    un_call all = barrier();
    for (int i = 0; i < 100; i++) EXPECT_EQUAL(un_run(argument, &all), UN_OK);
    return NULL;
}

/* Two threads of a rank take turns. */
static void take_turns(place *p) {
    pthread_t thread = start(run_barriers, p->group);
    run_barriers(p->group);
    join(thread);
    EXPECT_EQUAL(un_group_calls(p->group), 200);
}

static void be_left(place *p) {
    for (uint64_t i = 0; i < 20; i++) run_random_job(p, scramble(i), 1000);
    if (p->rank == 1) return;
    un_call all = barrier();
    EXPECT_EQUAL(un_run(p->group, &all), UN_PEER_CLOSED);
    EXPECT_EQUAL(un_group_failure(p->group).rank, 1);
    expect_end(p, UN_PEER_CLOSED);
}

/* To close a group ends the works in it; here the other rank never comes. */
static void leave(place *p) {
    un_work works[3];
    for (int i = 0; i < 3; i++) {
        works[i] = (un_work){.call = barrier()};
        if (!p->rank) EXPECT_EQUAL(un_submit(p->group, &works[i]), UN_OK);
    }
    if (p->rank) wait_for_failure(p);
    un_group_close(p->group);
    p->group = NULL;
    for (int i = 0; !p->rank && i < 3; i++) {
        EXPECT(un_work_done(&works[i]));
        EXPECT_EQUAL(works[i].status, UN_ABORTED);
    }
}

void test_endings(void) {
    test_mismatches();
    run_ranks(3, 6, refuse_together, NULL);
    run_ranks(3, 1, refuse_alone, NULL);
    for (int round = 0; round < 20; round++)
        run_ranks(2 + round % 3, round % 2 ? 1 : 8, be_aborted, &round);
    run_ranks(2, 4, run_out_of_time, NULL);
    for (int way = 0; way < 3; way++) run_ranks(2, 4, be_interrupted, &way);
    run_ranks(2, 4, reenter, NULL);
    run_ranks(3, 1, take_turns, NULL);
    for (int cores = 1; cores <= 6; cores += 5) run_ranks(3, cores, be_left, NULL);
    run_ranks(2, 2, leave, NULL);
}
