/* Calls that end badly: mismatches, refusals, aborts, deadlines, interrupts, peers that leave. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>

#include "base/wait.h"
#include "threads.h"

static void expect_end(const membership *me, un_status status) {
    un_failure failure = un_group_failure(me->group);
    EXPECT_EQUAL(failure.status, status);
    uint64_t calls = un_group_calls(me->group);
    un_call all = barrier();
    un_work work = {.call = all};
    EXPECT_EQUAL(un_run(me->group, &all), status);
    EXPECT_EQUAL(un_submit(me->group, &work), UN_OK);
    const un_call forever = {.timeout_ns = -1};
    EXPECT_EQUAL(un_work_wait(me->group, &work, &forever), status);
    EXPECT_EQUAL(un_group_calls(me->group), calls);
    EXPECT_EQUAL(un_group_failure(me->group).call, failure.call);
}

static void wait_for_failure(const membership *me) {
    while (!un_group_failure(me->group).status) sleep_ms(1);
}

/* -- what the ranks do not agree on ------------------------------------------------------------ */

/* The last rank does something else; nobody's output changes, and everybody can tell who did. */
static void disagree(membership *me) {
    const scenario *scenarios = me->shared;
    bool other = me->rank == me->ranks - 1;
    run_random_scenario(me, 1, 100);
    trial t;
    prepare_trial(&t, &scenarios[other], me->rank, me->ranks);
    EXPECT_EQUAL(un_run(me->group, &t.call), UN_MISMATCH);
    EXPECT(!t.output.memory || t.scenario.in_place || side_is_untouched(&t.output));
    free_trial(&t);
    un_failure failure = un_group_failure(me->group);
    EXPECT_EQUAL(failure.call, 2);
    for (int rank = 0; rank < me->ranks; rank++) {
        un_posted posted = un_group_state(me->group, rank, failure.call).posted;
        const scenario *theirs = &scenarios[rank == me->ranks - 1];
        EXPECT_EQUAL(posted.call, 2);
        EXPECT_EQUAL(posted.operation, theirs->operation);
        EXPECT_EQUAL(posted.root, theirs->root);
        EXPECT_EQUAL(posted.dtype, dtype_of(theirs->type));
    }
    expect_end(me, UN_MISMATCH);
}

static void test_mismatches(void) {
    scenario usual = {.operation = UN_ALL_REDUCE, .type = FLOAT32, .items = 100};
    for (int change = 0; change < 7; change++) {
        scenario scenarios[2] = {usual, usual}, *first = &scenarios[0], *last = &scenarios[1];
        if (change == 0) last->operation = UN_BROADCAST;
        if (change == 1) last->reduction = UN_MAX;
        if (change == 2) last->type = INT64;
        if (change == 3) last->items = 99;
        if (change > 3) first->operation = last->operation = UN_ALL_TO_ALL;
        if (change == 4) last->items = 20000;
        if (change == 5) first->items = 20000;
        if (change == 6) first->operation = last->operation = UN_GATHER, last->root = 1;
        run_ranks(2 + change % 3, change % 2 ? 1 : 8, disagree, scenarios);
    }
}

/* -- refusals ---------------------------------------------------------------------------------- */

/* All refuse alike, by their arguments or by the engine's own judgement: the group goes on. */
static void refuse_together(membership *me) {
    int64_t data[2] = {me->rank, 1};
    un_view view = {.data = (char *)data, .bytes = sizeof data};
    un_stream stream = {.views = &view, .count = 1, .bytes = sizeof data};
    un_call average = sum_of(&stream);
    average.reduction = UN_AVG;
    average.dtype = dtype_of(INT64);
    for (int i = 0; i < 10; i++) {
        EXPECT_EQUAL(i % 2 ? un_run(me->group, &average) : un_refuse(me->group, &average),
                     UN_REFUSED);
        EXPECT(data[0] == me->rank && data[1] == 1);
        run_random_scenario(me, scramble((uint64_t)i), 3000);
    }
}

static void refuse_alone(membership *me) {
    un_call all = barrier();
    if (me->rank)
        EXPECT_EQUAL(un_run(me->group, &all), UN_MISMATCH);
    else
        EXPECT_EQUAL(un_refuse(me->group, &all), UN_REFUSED);
    EXPECT(un_group_state(me->group, 0, 1).posted.refused);
    EXPECT(!un_group_state(me->group, 1, 1).posted.refused);
    expect_end(me, UN_MISMATCH);
}

/* -- aborts ------------------------------------------------------------------------------------ */

typedef struct delayed_abort {
    un_group *group;
    int delay_ms;
} delayed_abort;

static void *abort_later(void *argument) {
    const delayed_abort *a = argument;
    sleep_ms(a->delay_ms);
    un_group_abort(a->group, "enough");
    return NULL;
}

/* In the middle of calls and works; whatever was over before is as it should be. */
static void be_aborted(membership *me) {
    int round = *(int *)me->shared;
    delayed_abort a = {me->group, 1 + round};
    pthread_t thread = {0};
    if (me->rank == me->ranks - 1) thread = start(abort_later, &a);
    const un_call forever = {.timeout_ns = -1};
    un_status status = UN_OK;
    for (uint64_t i = 0; !status; i++) {
        scenario c = random_scenario(scramble(i + (uint64_t)round * 1000), me->ranks, 20000);
        trial t;
        prepare_trial(&t, &c, me->rank, me->ranks);
        un_work work = {.call = t.call};
        if (i % 2) {
            status = un_run(me->group, &t.call);
        } else {
            EXPECT_EQUAL(un_submit(me->group, &work), UN_OK);
            status = un_work_wait(me->group, &work, &forever);
        }
        if (!status) check_trial(&t);
        free_trial(&t);
    }
    EXPECT_EQUAL(status, UN_ABORTED);
    EXPECT_EQUAL(un_group_failure(me->group).rank, me->ranks - 1);
    if (me->rank == me->ranks - 1) join(thread);
    expect_end(me, UN_ABORTED);
}

/* -- deadlines, interrupts, departures --------------------------------------------------------- */

static void run_out_of_time(membership *me) {
    un_call all = barrier();
    all.timeout_ns = 100 * MILLISECOND_NS;
    if (me->rank)
        wait_for_failure(me);
    else
        EXPECT_EQUAL(un_run(me->group, &all), UN_TIMEOUT);
    EXPECT_EQUAL(un_group_failure(me->group).rank, 1);
    expect_end(me, UN_TIMEOUT);
}

static int stop(void *argument) {
    int *pauses = argument;
    return ++*pauses == 2;
}

/* In a call, which ends the group: its peers wait for it. */
static void be_interrupted(membership *me) {
    int pauses = 0;
    un_call all = barrier();
    all.pause = stop;
    all.argument = &pauses;
    if (me->rank)
        wait_for_failure(me);
    else
        EXPECT_EQUAL(un_run(me->group, &all), UN_INTERRUPTED);
    char reason[UN_TEXT_BYTES];
    EXPECT(un_group_read_note(me->group, 0, UN_REASON, UN_ABOUT_MESSAGES, reason));
    expect_end(me, me->rank ? UN_ABORTED : UN_INTERRUPTED);
}

/* In a work that the waiting thread runs itself, and in one that the worker runs: both go on. The
 * first one is behind another, which then is the one that is interrupted. */
static void be_interrupted_in_a_wait(membership *me) {
    static _Atomic int interrupted;
    int way = *(int *)me->shared, pauses = 0;
    un_call hooks = {.timeout_ns = way == 2 ? 30 * SECOND_NS : -1,
                     .pause = stop,
                     .argument = &pauses};
    if (!me->rank) {
        un_work works[2] = {{.call = barrier()}, {.call = barrier()}};
        for (int i = 0; i < 2; i++) EXPECT_EQUAL(un_submit(me->group, &works[i]), UN_OK);
        un_work *work = &works[way == 1];
        for (int times = 0; times < 3; times++, pauses = 0)
            EXPECT_EQUAL(un_work_wait(me->group, work, &hooks), UN_INTERRUPTED);
        interrupted = 1;
        hooks.pause = NULL;
        for (int i = 0; i < 2; i++)
            EXPECT_EQUAL(un_work_wait(me->group, &works[i], &hooks), UN_OK);
    } else {
        while (!interrupted) sleep_ms(1);
        un_call all = barrier();
        for (int i = 0; i < 2; i++) EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
    }
    interrupted = 0;
    EXPECT_EQUAL(un_group_failure(me->group).status, UN_OK);
}

static int call_again(void *argument) {
    un_call all = barrier();
    EXPECT_EQUAL(un_run(argument, &all), UN_REENTERED);
    return 0;
}

/* A pause that calls into its own group, as a signal handler might. */
static void reenter(membership *me) {
    un_call all = barrier();
    all.pause = call_again;
    all.argument = me->group;
    if (me->rank) sleep_ms(150);
    EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
}

static void *run_barriers(void *argument) {
    un_call all = barrier();
    for (int i = 0; i < 100; i++) EXPECT_EQUAL(un_run(argument, &all), UN_OK);
    return NULL;
}

/* Two threads of a rank make calls alternately. */
static void call_from_two_threads(membership *me) {
    pthread_t thread = start(run_barriers, me->group);
    run_barriers(me->group);
    join(thread);
    EXPECT_EQUAL(un_group_calls(me->group), 200);
}

static void be_left(membership *me) {
    for (uint64_t i = 0; i < 20; i++) run_random_scenario(me, scramble(i), 1000);
    if (me->rank == 1) return;
    un_call all = barrier();
    EXPECT_EQUAL(un_run(me->group, &all), UN_PEER_CLOSED);
    EXPECT_EQUAL(un_group_failure(me->group).rank, 1);
    expect_end(me, UN_PEER_CLOSED);
}

/* To close a group ends the works in it. Those that all have begun finish before, if they may; to
 * the others the other rank never comes. */
static void leave(membership *me) {
    const un_call no_hooks = {0};
    bool missing[2] = {false, false};
    un_work works[3];
    for (int i = 0; i < 3; i++) works[i] = (un_work){.call = barrier()};
    for (int i = 0; i < 3; i++) EXPECT_EQUAL(un_submit(me->group, &works[i]), UN_OK);
    EXPECT(un_group_finish(me->group, &no_hooks, missing));
    for (int i = 0; i < 3; i++) EXPECT(un_work_done(&works[i]));
    for (int i = 0; !me->rank && i < 3; i++) {
        works[i] = (un_work){.call = barrier()};
        EXPECT_EQUAL(un_submit(me->group, &works[i]), UN_OK);
    }
    if (me->rank)
        wait_for_failure(me);
    else
        EXPECT(!un_group_finish(me->group, &no_hooks, missing) && missing[1] && !missing[0]);
    un_group_close(me->group);
    me->group = NULL;
    for (int i = 0; !me->rank && i < 3; i++) {
        EXPECT(un_work_done(&works[i]));
        EXPECT_EQUAL(works[i].status, UN_ABORTED);
    }
}

/* A peer that makes its last call and closes the group has come, even if it does both between a
 * waiting rank's look for the call and its look for the close. */
static struct last_call {
    flag_t call;
    control *peer;
} last;

static void set_page(int protection) {
    uintptr_t closed = (uintptr_t)&last.peer->closed;
    EXPECT(!mprotect((void *)(closed - closed % PAGE_BYTES), PAGE_BYTES, protection));
}

/* The waiting rank looks whether the peer has closed the group. */
static void call_and_close(int number, siginfo_t *fault, void *ignored) {
    (void)number, (void)ignored;
    EXPECT(fault->si_addr == (void *)&last.peer->closed);
    set_page(PROT_READ | PROT_WRITE);
    atomic_store(&last.call, 1);
    atomic_store(&last.peer->closed, 1);
}

static void test_a_last_call(void) {
    un_group *groups[2];
    un_call all = barrier();
    patience p = {.call = &all};
    struct sigaction before, closing = {.sa_sigaction = call_and_close, .sa_flags = SA_SIGINFO};
    open_groups(2, 2, groups);
    groups[0]->spin = (spinning){.before_trial = UINT32_MAX}; /* looks at nothing else of the peer */
    last.peer = control_of(groups[0], 1);
    EXPECT(!sigaction(SIGSEGV, &closing, &before));
    set_page(PROT_NONE);
    EXPECT_EQUAL(await_slowly(groups[0], 1, &last.call, 1, &p), UN_OK);
    EXPECT(atomic_load(&last.peer->closed));
    EXPECT(!sigaction(SIGSEGV, &before, NULL));
    for (int rank = 0; rank < 2; rank++) un_group_close(groups[rank]);
}

void test_call_failures(void) {
    test_mismatches();
    run_ranks(3, 6, refuse_together, NULL);
    run_ranks(3, 1, refuse_alone, NULL);
    for (int round = 0; round < 20; round++)
        run_ranks(2 + round % 3, round % 2 ? 1 : 8, be_aborted, &round);
    run_ranks(2, 4, run_out_of_time, NULL);
    run_ranks(2, 4, be_interrupted, NULL);
    for (int way = 0; way < 3; way++)
        for (int cores = 1; cores <= 4; cores += 3)
            run_ranks(2, cores, be_interrupted_in_a_wait, &way);
    run_ranks(2, 4, reenter, NULL);
    run_ranks(3, 1, call_from_two_threads, NULL);
    for (int cores = 1; cores <= 6; cores += 5) run_ranks(3, cores, be_left, NULL);
    run_ranks(2, 2, leave, NULL);
    test_a_last_call();
}
