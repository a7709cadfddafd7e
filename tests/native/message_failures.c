/* Messages that end badly: unfit ones, deadlocks, limits, interrupts, aborts, peers that leave. */
#include "checked_messages.h"

static const un_call forever = {.timeout_ns = -1};

/* One message whose end is expected to be `wanted`. */
static void run_in_vain(const membership *me, bool sends, int peer, size_t items,
                        un_status wanted) {
    checked_message m;
    prepare_message(&m, sends, me->rank, peer, 1, items, CONTIGUOUS);
    EXPECT_EQUAL(un_message_run(me->group, &m.message, &forever), wanted);
    free_side(&m.side);
}

static void expect_failure(const membership *me, un_status status) {
    EXPECT_EQUAL(un_group_failure(me->group).status, status);
    un_call all = barrier();
    EXPECT_EQUAL(un_run(me->group, &all), status);
    run_in_vain(me, me->rank, (me->rank + 1) % me->ranks, 10, status);
}

static void wait_for_failure(const membership *me) {
    while (!un_group_failure(me->group).status) sleep_ms(1);
}

static void send_unfit(membership *me) {
    size_t items = *(size_t *)me->shared;
    run_in_vain(me, me->rank == 0, 1 - me->rank, items + (size_t)me->rank, UN_UNFIT);
    EXPECT_EQUAL(un_group_failure(me->group).rank, 0);
    expect_failure(me, UN_UNFIT);
}

/* Everybody waits for the right neighbour to send, or to take. */
static void wait_in_cycle(membership *me) {
    bool sends = *(int *)me->shared;
    run_in_vain(me, sends, (me->rank + 1) % me->ranks, 1000, UN_DEADLOCK);
    if (me->ranks > 1) EXPECT(un_group_state(me->group, me->rank, 0).waiting.waits);
    expect_failure(me, UN_DEADLOCK);
}

/* Two threads of every rank wait in a cycle, but a third has yet to write. */
typedef struct listener {
    const membership *membership;
    int64_t tag;
} listener;

static void *listen_for(void *argument) {
    const listener *l = argument;
    const membership *me = l->membership;
    checked_message in;
    prepare_message(&in, false, me->rank, (me->rank + 1) % me->ranks, l->tag, 10, CONTIGUOUS);
    start_message(&in, me->group);
    un_call limit = {.timeout_ns = 20 * MILLISECOND_NS};
    un_message_wait(me->group, &in.message, &limit);
    await_message(&in, me->group);
    return NULL;
}

static void write_late(membership *me) {
    listener listeners[2] = {{me, 1}, {me, 2}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) threads[i] = start(listen_for, &listeners[i]);
    sleep_ms(300);
    for (int i = 0; i < 2; i++) {
        checked_message out;
        int left = (me->rank + me->ranks - 1) % me->ranks;
        prepare_message(&out, true, me->rank, left, listeners[i].tag, 10, CONTIGUOUS);
        start_message(&out, me->group);
        await_message(&out, me->group);
    }
    for (int i = 0; i < 2; i++) join(threads[i]);
}

/* One rank is late, but no cycle closes: nothing happens. */
static void wait_for_latecomer(membership *me) {
    checked_message m;
    if (me->rank == me->ranks - 1) sleep_ms(200);
    prepare_message(&m, !me->rank, me->rank, me->rank ? 0 : 1, 1, 10, CONTIGUOUS);
    checked_message others[MOST_RANKS];
    for (int rank = 2; !me->rank && rank < me->ranks; rank++) {
        prepare_message(&others[rank], true, 0, rank, 1, 10, CONTIGUOUS);
        start_message(&others[rank], me->group);
    }
    EXPECT_EQUAL(un_message_run(me->group, &m.message, &forever), UN_OK);
    finish_message(&m);
    for (int rank = 2; !me->rank && rank < me->ranks; rank++)
        await_message(&others[rank], me->group);
}

static void run_out_of_time(membership *me) {
    if (me->rank) {
        wait_for_failure(me);
    } else {
        checked_message m;
        prepare_message(&m, false, 0, 1, 1, 10, CONTIGUOUS);
        m.message.timeout_ns = 150 * MILLISECOND_NS;
        EXPECT_EQUAL(un_message_run(me->group, &m.message, &forever), UN_TIMEOUT);
        free_side(&m.side);
    }
    EXPECT_EQUAL(un_group_failure(me->group).rank, 0);
    expect_failure(me, UN_TIMEOUT);
}

static int stop(void *argument) {
    int *pauses = argument;
    return ++*pauses == 2;
}

/* First in waiting for a message, which goes on; then in a blocking one, which ends the group. */
static void be_interrupted(membership *me) {
    static _Atomic int interrupted;
    int pauses = 0;
    un_call hooks = {.timeout_ns = -1, .pause = stop, .argument = &pauses};
    un_status wanted = me->rank ? UN_ABORTED : UN_INTERRUPTED;
    checked_message m;
    prepare_message(&m, !me->rank, me->rank, 1 - me->rank, 1, 100000, CONTIGUOUS);
    while (me->rank && !interrupted) sleep_ms(1);
    start_message(&m, me->group);
    if (!me->rank) {
        EXPECT_EQUAL(un_message_wait(me->group, &m.message, &hooks), UN_INTERRUPTED);
        interrupted = 1;
    }
    await_message(&m, me->group);
    pauses = 0;
    prepare_message(&m, !me->rank, me->rank, 1 - me->rank, 1, 1000, CONTIGUOUS);
    if (me->rank)
        wait_for_failure(me);
    else
        EXPECT_EQUAL(un_message_run(me->group, &m.message, &hooks), wanted);
    free_side(&m.side);
    expect_failure(me, wanted);
    interrupted = 0;
}

/* Large messages in both directions, of which an abort may find any half done. Their memory is
 * freed as soon as they are over. */
static void *abort_soon(void *argument) {
    membership *me = argument;
    sleep_ms(3);
    un_group_abort(me->group, "enough");
    return NULL;
}

static void be_aborted(membership *me) {
    int right = (me->rank + 1) % me->ranks, left = (me->rank + me->ranks - 1) % me->ranks;
    pthread_t thread = start(abort_soon, me);
    for (un_status status = UN_OK; !status;) {
        checked_message out, in;
        prepare_message(&out, true, me->rank, right, 1, 90000, CONTIGUOUS);
        prepare_message(&in, false, me->rank, left, 1, 90000, CONTIGUOUS);
        start_message(&out, me->group);
        start_message(&in, me->group);
        status = un_message_wait(me->group, &in.message, &forever);
        if (!status) status = un_message_wait(me->group, &out.message, &forever);
        un_message_wait(me->group, &out.message, &forever);
        EXPECT(un_message_done(&in.message) && un_message_done(&out.message));
        EXPECT(!status || status == UN_ABORTED);
        free_side(&out.side);
        free_side(&in.side);
    }
    join(thread);
    expect_failure(me, UN_ABORTED);
}

static void be_left(membership *me) {
    if (me->rank) return;
    run_in_vain(me, *(int *)me->shared, 1, 10, UN_PEER_CLOSED);
    expect_failure(me, UN_PEER_CLOSED);
}

/* To close a group ends what is under way in it. */
static void leave(membership *me) {
    checked_message messages[2];
    for (int i = 0; i < 2; i++) {
        prepare_message(&messages[i], i, me->rank, 1 - me->rank, 1 + me->rank, 1000, CONTIGUOUS);
        start_message(&messages[i], me->group);
    }
    un_group_close(me->group);
    me->group = NULL;
    for (int i = 0; i < 2; i++) {
        EXPECT(un_message_done(&messages[i].message));
        EXPECT_EQUAL(messages[i].message.status, UN_ABORTED);
        free_side(&messages[i].side);
    }
}

void test_message_failures(void) {
    for (size_t items = 10; items < 1000; items *= 90) run_ranks(2, 4, send_unfit, &items);
    for (int sends = 0; sends < 2; sends++) {
        for (int ranks = 1; ranks <= 4; ranks++) run_ranks(ranks, 2, wait_in_cycle, &sends);
        run_ranks(2, 4, be_left, &sends);
    }
    run_ranks(3, 1, write_late, NULL);
    run_ranks(3, 6, wait_for_latecomer, NULL);
    run_ranks(2, 1, run_out_of_time, NULL);
    run_ranks(2, 4, be_interrupted, NULL);
    for (int i = 0; i < 5; i++) run_ranks(3, i % 2 ? 1 : 6, be_aborted, NULL);
    run_ranks(2, 1, leave, NULL);
}
