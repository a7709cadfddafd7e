/* Works: calls that go on by themselves, waited for in any order, by any thread, or by nobody. */
#include <sched.h>

#include "threads.h"

enum { WORKS = 24 };

static const un_call forever = {.timeout_ns = -1};

/* A row of works of one rank, the same scenarios on every rank. */
typedef struct row {
    const membership *membership;
    trial trials[WORKS];
    un_work works[WORKS];
} row;

static row *make_row(const membership *me, uint64_t seed) {
    row *r = calloc(1, sizeof *r);
    r->membership = me;
    for (int i = 0; i < WORKS; i++) {
        scenario c = random_scenario(scramble(seed + (uint64_t)i), me->ranks, 4000);
        prepare_trial(&r->trials[i], &c, me->rank, me->ranks);
        r->works[i] = (un_work){.call = r->trials[i].call};
    }
    return r;
}

static void submit(row *r, int i) {
    EXPECT_EQUAL(un_submit(r->membership->group, &r->works[i]), UN_OK);
}

static void submit_row(row *r) {
    for (int i = 0; i < WORKS; i++) submit(r, i);
}

static void wait_for(row *r, int i) {
    EXPECT_EQUAL(un_work_wait(r->membership->group, &r->works[i], &forever), UN_OK);
    EXPECT(un_work_done(&r->works[i]));
}

static void free_row(row *r) {
    for (int i = 0; i < WORKS; i++) {
        EXPECT_EQUAL(r->works[i].status, UN_OK);
        check_trial(&r->trials[i]);
        free_trial(&r->trials[i]);
    }
    free(r);
}

static void wait_backwards(membership *me) {
    row *r = make_row(me, 100);
    submit_row(r);
    for (int i = WORKS - 1; i >= 0; i--) wait_for(r, i);
    free_row(r);
}

static void wait_at_once(membership *me) {
    row *r = make_row(me, 200);
    for (int i = 0; i < WORKS; i++) {
        submit(r, i);
        wait_for(r, i);
    }
    free_row(r);
}

/* Nobody waits: the works are found done. */
static void drop(membership *me) {
    row *r = make_row(me, 300);
    submit_row(r);
    for (int i = 0; i < WORKS; i++)
        while (!un_work_done(&r->works[i])) sched_yield();
    free_row(r);
}

/* The same one by one; odd ranks ask with some effort. */
static void drop_each(membership *me) {
    row *r = make_row(me, 350);
    for (int i = 0; i < WORKS; i++) {
        submit(r, i);
        while (me->rank % 2 ? !un_work_test(me->group, &r->works[i])
                            : !un_work_done(&r->works[i]))
            sched_yield();
    }
    free_row(r);
}

static un_call small_sum(un_stream *stream) {
    return (un_call){.operation = UN_ALL_REDUCE,
                     .dtype = un_dtype_of(UN_INT, 32, 1),
                     .factor = 1,
                     .input = stream,
                     .output = stream,
                     .timeout_ns = (int64_t)60 * 1000000000};
}

/* A short call is posted when it is submitted: peers are done with it though we do nothing more,
 * and whoever comes last has the result at once. */
static void post_when_submitted(membership *me) {
    _Atomic int *submitted = me->shared;
    int32_t number = me->rank + 1;
    un_view view = {.data = (char *)&number, .bytes = sizeof number};
    un_stream stream = {.views = &view, .count = 1, .bytes = sizeof number};
    un_work work = {.call = small_sum(&stream)};
    bool is_last = me->rank == me->ranks - 1;
    while (is_last && *submitted < me->ranks - 1) sched_yield();
    EXPECT_EQUAL(un_submit(me->group, &work), UN_OK);
    if (is_last) EXPECT(un_work_done(&work));
    ++*submitted;
    while (*submitted < me->ranks) sched_yield();
    while (!un_work_test(me->group, &work)) sched_yield(); /* another thread may be at it */
    EXPECT_EQUAL(un_work_wait(me->group, &work, &forever), UN_OK);
    EXPECT_EQUAL(number, me->ranks * (me->ranks + 1) / 2);
}

/* A blocking call comes after what was submitted before it. */
static void mix_with_calls(membership *me) {
    row *r = make_row(me, 400);
    for (int i = 0; i < WORKS; i++) {
        submit(r, i);
        if (i % 5 == 4) {
            run_random_scenario(me, (uint64_t)i, 4000);
            for (int before = 0; before <= i; before++) EXPECT(un_work_done(&r->works[before]));
        }
    }
    for (int i = 0; i < WORKS; i++) wait_for(r, i);
    free_row(r);
}

static void wait_with_limits(membership *me) {
    row *r = make_row(me, 500);
    submit_row(r);
    for (int i = 0; i < WORKS; i++) {
        un_status status = UN_NOT_YET;
        for (int64_t limit_ns = 0; status == UN_NOT_YET; limit_ns += 100 * 1000) {
            const un_call limit = {.timeout_ns = limit_ns};
            status = un_work_wait(me->group, &r->works[i], &limit);
        }
        EXPECT_EQUAL(status, UN_OK);
    }
    free_row(r);
}

static void *wait_for_odd(void *argument) {
    row *r = argument;
    for (int i = 1; i < WORKS; i += 2) wait_for(r, i);
    return NULL;
}

static void *wait_for_all(void *argument) {
    row *r = argument;
    for (int i = 0; i < WORKS; i++) wait_for(r, i);
    return NULL;
}

/* Several threads wait for the same works while another makes calls. */
static void wait_elsewhere(membership *me) {
    row *r = make_row(me, 600);
    submit_row(r);
    pthread_t odd = start(wait_for_odd, r), all = start(wait_for_all, r);
    for (uint64_t i = 0; i < 10; i++) run_random_scenario(me, scramble(i), 4000);
    for (int i = WORKS - 1; i >= 0; i -= 3) wait_for(r, i);
    join(odd);
    join(all);
    free_row(r);
}

/* What a thread that makes an error's text reads, while the group is at work. */
typedef struct observer {
    const membership *membership;
    _Atomic bool stop;
} observer;

static void *observe(void *argument) {
    observer *r = argument;
    const membership *me = r->membership;
    while (!r->stop) {
        uint64_t calls = un_group_calls(me->group);
        EXPECT_EQUAL(un_group_failure(me->group).status, UN_OK);
        for (int rank = 0; rank < me->ranks; rank++) {
            un_posted posted = un_group_state(me->group, rank, calls).posted;
            EXPECT(posted.operation <= UN_ALL_TO_ALL);
            EXPECT(!un_group_state(me->group, rank, 0).waiting.waits);
        }
        EXPECT(un_memory_room() > 0 && un_cpu_quota() > 0);
    }
    return NULL;
}

static void be_observed(membership *me) {
    observer r = {.membership = me};
    pthread_t thread = start(observe, &r);
    for (uint64_t i = 0; i < 100; i++) run_random_scenario(me, scramble(i + 700), 2000);
    wait_backwards(me);
    r.stop = true;
    join(thread);
}

/* Ranks submit to two groups in opposite orders. */
static void submit_crosswise(membership *me) {
    un_group **second = me->shared;
    membership other = {second[me->rank], me->rank, me->ranks, NULL};
    row *mine = make_row(me, 800), *theirs = make_row(&other, 900);
    for (int i = 0; i < WORKS; i++) {
        submit(me->rank % 2 ? mine : theirs, i);
        submit(me->rank % 2 ? theirs : mine, i);
    }
    wait_for_all(me->rank % 2 ? theirs : mine);
    wait_for_all(me->rank % 2 ? mine : theirs);
    free_row(mine);
    free_row(theirs);
    un_group_close(other.group);
}

void test_works(void) {
    static void (*const bodies[])(membership *) = {wait_backwards, wait_at_once,     drop,
                                              drop_each,      mix_with_calls,   wait_with_limits,
                                              wait_elsewhere, be_observed};
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        run_ranks(1, 2, bodies[i], NULL);
        run_ranks(2, 4, bodies[i], NULL);
        run_ranks(3, 1, bodies[i], NULL);
    }
    for (int ranks = 1; ranks <= 4; ranks++) {
        _Atomic int submitted = 0;
        run_ranks(ranks, ranks, post_when_submitted, &submitted);
    }
    for (int cores = 1; cores <= 6; cores += 5) {
        un_group *second[3];
        open_groups(3, cores, second);
        run_ranks(3, cores, submit_crosswise, second);
    }
}
