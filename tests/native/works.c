/* Works: calls that go on by themselves, waited for in any order, by any thread, or by nobody. */
#include <sched.h>

#include "threads.h"

enum { WORKS = 24 };

static const un_call forever = {.timeout_ns = -1};

/* A row of works of one rank, the same jobs on every rank. */
typedef struct row {
    const place *place;
    task tasks[WORKS];
    un_work works[WORKS];
} row;

static row *make_row(const place *p, uint64_t seed) {
    row *r = calloc(1, sizeof *r);
    r->place = p;
    for (int i = 0; i < WORKS; i++) {
        job j = random_job(scramble(seed + (uint64_t)i), p->ranks, 4000);
        prepare_task(&r->tasks[i], &j, p->rank, p->ranks);
        r->works[i] = (un_work){.call = r->tasks[i].call};
    }
    return r;
}

static void submit(row *r, int i) {
    EXPECT_EQUAL(un_submit(r->place->group, &r->works[i]), UN_OK);
}

static void submit_row(row *r) {
    for (int i = 0; i < WORKS; i++) submit(r, i);
}

static void wait_for(row *r, int i) {
    EXPECT_EQUAL(un_work_wait(r->place->group, &r->works[i], &forever), UN_OK);
    EXPECT(un_work_done(&r->works[i]));
}

static void free_row(row *r) {
    for (int i = 0; i < WORKS; i++) {
        EXPECT_EQUAL(r->works[i].status, UN_OK);
        check_task(&r->tasks[i]);
        free_task(&r->tasks[i]);
    }
    free(r);
}

static void wait_backwards(place *p) {
    row *r = make_row(p, 100);
    submit_row(r);
    for (int i = WORKS - 1; i >= 0; i--) wait_for(r, i);
    free_row(r);
}

static void wait_at_once(place *p) {
    row *r = make_row(p, 200);
    for (int i = 0; i < WORKS; i++) {
        submit(r, i);
        wait_for(r, i);
    }
    free_row(r);
}

/* Nobody waits: the works are found done. */
static void drop(place *p) {
    row *r = make_row(p, 300);
    submit_row(r);
    for (int i = 0; i < WORKS; i++)
        while (!un_work_done(&r->works[i])) sched_yield();
    free_row(r);
}

/* A blocking call comes after what was submitted before it. */
static void mix_with_calls(place *p) {
    row *r = make_row(p, 400);
    for (int i = 0; i < WORKS; i++) {
        submit(r, i);
        if (i % 5 == 4) {
            run_random_job(p, (uint64_t)i, 4000);
            for (int before = 0; before <= i; before++) EXPECT(un_work_done(&r->works[before]));
        }
    }
    for (int i = 0; i < WORKS; i++) wait_for(r, i);
    free_row(r);
}

static void wait_with_limits(place *p) {
    row *r = make_row(p, 500);
    submit_row(r);
    for (int i = 0; i < WORKS; i++) {
        un_status status = UN_NOT_YET;
        for (int64_t limit_ns = 0; status == UN_NOT_YET; limit_ns += 100 * 1000) {
            const un_call limit = {.timeout_ns = limit_ns};
            status = un_work_wait(p->group, &r->works[i], &limit);
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
static void wait_elsewhere(place *p) {
    row *r = make_row(p, 600);
    submit_row(r);
    pthread_t odd = start(wait_for_odd, r), all = start(wait_for_all, r);
    for (uint64_t i = 0; i < 10; i++) run_random_job(p, scramble(i), 4000);
    for (int i = WORKS - 1; i >= 0; i -= 3) wait_for(r, i);
    join(odd);
    join(all);
    free_row(r);
}

/* What a thread that makes reports reads, while the group is at work. */
typedef struct reporter {
    const place *place;
    _Atomic bool stop;
} reporter;

static void *report(void *argument) {
    reporter *r = argument;
    const place *p = r->place;
    while (!r->stop) {
        uint64_t calls = un_group_calls(p->group);
        EXPECT_EQUAL(un_group_failure(p->group).status, UN_OK);
        for (int rank = 0; rank < p->ranks; rank++) {
            un_posted posted = un_group_posted(p->group, rank, calls);
            EXPECT(posted.operation <= UN_ALL_TO_ALL);
            EXPECT(!un_group_waiting(p->group, rank).waits);
        }
        EXPECT(un_memory_room() > 0 && un_cpu_quota() > 0);
    }
    return NULL;
}

static void be_reported(place *p) {
    reporter r = {.place = p};
    pthread_t thread = start(report, &r);
    for (uint64_t i = 0; i < 100; i++) run_random_job(p, scramble(i + 700), 2000);
    wait_backwards(p);
    r.stop = true;
    join(thread);
}

/* Ranks submit to two groups in opposite orders. */
static void cross(place *p) {
    un_group **second = p->shared;
    place other = {second[p->rank], p->rank, p->ranks, NULL};
    row *mine = make_row(p, 800), *theirs = make_row(&other, 900);
    for (int i = 0; i < WORKS; i++) {
        submit(p->rank % 2 ? mine : theirs, i);
        submit(p->rank % 2 ? theirs : mine, i);
    }
    wait_for_all(p->rank % 2 ? theirs : mine);
    wait_for_all(p->rank % 2 ? mine : theirs);
    free_row(mine);
    free_row(theirs);
    un_group_close(other.group);
}

void test_works(void) {
    static void (*const bodies[])(place *) = {wait_backwards, wait_at_once,     drop,
                                              mix_with_calls, wait_with_limits, wait_elsewhere,
                                              be_reported};
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        run_ranks(1, 2, bodies[i], NULL);
        run_ranks(2, 4, bodies[i], NULL);
        run_ranks(3, 1, bodies[i], NULL);
    }
    for (int cores = 1; cores <= 6; cores += 5) {
        un_group *second[3];
        open_places(3, cores, second);
        run_ranks(3, cores, cross, second);
    }
}
