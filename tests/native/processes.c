/* Processes: peers that die, and children that hold a group which is not theirs. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "threads.h"

/* -- death ------------------------------------------------------------------------------------- */

/* A process that stands for the last rank and does nothing until it is killed. */
typedef struct victim {
    pid_t process;
    int pidfd;
    bool dead;
} victim;

static victim fork_victim(void) {
    victim v = {.process = fork()};
    EXPECT(v.process >= 0);
    if (!v.process)
        for (;;) pause();
    v.pidfd = (int)syscall(SYS_pidfd_open, v.process, 0);
    EXPECT(v.pidfd >= 0);
    return v;
}

static void kill_victim(victim *v) {
    int status;
    kill(v->process, SIGKILL);
    EXPECT_EQUAL(waitpid(v->process, &status, 0), v->process);
    v->dead = true;
}

static void lose_last_rank(membership *me) {
    victim *v = me->shared;
    int last = me->ranks - 1;
    if (me->rank != last) EXPECT(un_group_watch(me->group, last, 1, v->pidfd));
    if (me->rank == last) {
        if (!v->dead) sleep_ms(50);
        if (!v->dead) kill_victim(v);
        while (!un_group_failure(me->group).status) sleep_ms(1);
    }
    un_call all = barrier();
    EXPECT_EQUAL(un_run(me->group, &all), UN_PEER_LOST);
    un_failure failure = un_group_failure(me->group);
    EXPECT_EQUAL(failure.rank, last);
    if (me->rank != last) EXPECT_EQUAL(failure.call, 1);
    if (failure.detail) EXPECT_EQUAL(failure.detail, UN_ENDING_KNOWN | SIGKILL);
}

/* A group with a process that others of ours have seen die: one that died while it was made. */
static void find_the_dead(membership *me) {
    const victim *v = me->shared;
    if (!me->rank) EXPECT(un_group_watch(me->group, 1, 1, v->pidfd));
    while (!un_group_failure(me->group).status) sleep_ms(1);
    if (me->rank) return;
    un_group *groups[2];
    open_groups(2, 2, groups);
    EXPECT(un_group_watch(groups[0], 1, 1, v->pidfd));
    EXPECT_EQUAL(un_group_failure(groups[0]).status, UN_PEER_LOST);
    for (int rank = 0; rank < 2; rank++) un_group_close(groups[rank]);
}

/* Groups come and go while the same process is watched in all of them. */
static void watch_in_passing(membership *me) {
    const victim *v = me->shared;
    for (int rank = 0; rank < me->ranks; rank++)
        if (rank != me->rank) EXPECT(un_group_watch(me->group, rank, 1, v->pidfd));
    EXPECT(!un_group_watch(me->group, me->rank, 1, v->pidfd));
    for (uint64_t i = 0; i < 5; i++) run_random_scenario(me, scramble(i), 1000);
}

static void test_deaths(void) {
    victim v = fork_victim();
    for (int i = 0; i < 10; i++) run_ranks(3, 1, watch_in_passing, &v);
    run_ranks(3, 6, lose_last_rank, &v);
    run_ranks(2, 1, lose_last_rank, &v); /* which is dead already */
    run_ranks(2, 1, find_the_dead, &v);
    close(v.pidfd);
}

/* -- forks ------------------------------------------------------------------------------------- */

static void use_inherited(un_group *g) {
    un_call all = barrier();
    un_work work = {.call = all};
    un_message message = {.peer = 0};
    un_group *beside;
    EXPECT_EQUAL(un_run(g, &all), UN_FORKED);
    EXPECT_EQUAL(un_refuse(g, &all), UN_FORKED);
    EXPECT_EQUAL(un_submit(g, &work), UN_FORKED);
    EXPECT_EQUAL(un_message_start(g, &message), UN_FORKED);
    EXPECT_EQUAL(un_group_open_beside(g, 0, &beside), UN_FORKED);
    EXPECT(!un_group_watch(g, 0, 1, -1));
    un_group_abort(g, "enough");
    un_group_close(g);
}

static void test_forks(void) {
    un_group *groups[2];
    open_groups(2, 2, groups);
    pid_t child = fork();
    EXPECT(child >= 0);
    if (!child) {
        use_inherited(groups[0]);
        _exit(0);
    }
    int status;
    EXPECT_EQUAL(waitpid(child, &status, 0), child);
    EXPECT_EQUAL(status, 0);
    EXPECT_EQUAL(un_group_failure(groups[1]).status, UN_OK);
    un_group_close(groups[0]);
    un_group_close(groups[1]);
}

void test_processes(void) {
    test_deaths();
    test_forks();
}
