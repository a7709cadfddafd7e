/* Messages that end badly: unfit ones, circles, limits, interrupts, aborts, peers that leave. */
#include "checked_messages.h"

static const un_call forever = {.timeout_ns = -1};

/* One message whose end is expected to be `wanted`. */
static void run_in_vain(const place *p, bool sends, int peer, size_t items, un_status wanted) {
    letter l;
    prepare_letter(&l, sends, p->rank, peer, 1, items, CONTIGUOUS);
    EXPECT_EQUAL(un_message_run(p->group, &l.message, &forever), wanted);
    free_side(&l.side);
}

static void expect_failure(const place *p, un_status status) {
    EXPECT_EQUAL(un_group_failure(p->group).status, status);
    un_call all = barrier();
    EXPECT_EQUAL(un_run(p->group, &all), status);
    run_in_vain(p, p->rank, (p->rank + 1) % p->ranks, 10, status);
}

static void wait_for_failure(const place *p) {
    while (!un_group_failure(p->group).status) sleep_ms(1);
}

static void send_unfit(place *p) {
    size_t items = *(size_t *)p->shared;
    run_in_vain(p, p->rank == 0, 1 - p->rank, items + (size_t)p->rank, UN_UNFIT);
    EXPECT_EQUAL(un_group_failure(p->group).rank, 0);
    expect_failure(p, UN_UNFIT);
}

/* Everybody waits for the right neighbour to send, or to take. */
static void wait_in_circle(place *p) {
    bool sends = *(int *)p->shared;
    run_in_vain(p, sends, (p->rank + 1) % p->ranks, 1000, UN_DEADLOCK);
    if (p->ranks > 1) EXPECT(un_group_waiting(p->group, p->rank).waits);
    expect_failure(p, UN_DEADLOCK);
}

/* Two threads of every rank wait in a circle, but a third has yet to write. */
typedef struct listener {
    const place *place;
    int64_t tag;
} listener;

static void *listen_for(void *argument) {
    const listener *l = argument;
    const place *p = l->place;
    letter in;
    prepare_letter(&in, false, p->rank, (p->rank + 1) % p->ranks, l->tag, 10, CONTIGUOUS);
    start_letter(&in, p->group);
    un_call limit = {.timeout_ns = 20 * MILLISECOND_NS};
    un_message_wait(p->group, &in.message, &limit);
    await_letter(&in, p->group);
    return NULL;
}

static void write_late(place *p) {
    listener listeners[2] = {{p, 1}, {p, 2}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) threads[i] = start(listen_for, &listeners[i]);
    sleep_ms(300);
    for (int i = 0; i < 2; i++) {
        letter out;
        int left = (p->rank + p->ranks - 1) % p->ranks;
        prepare_letter(&out, true, p->rank, left, listeners[i].tag, 10, CONTIGUOUS);
        start_letter(&out, p->group);
        await_letter(&out, p->group);
    }
    for (int i = 0; i < 2; i++) join(threads[i]);
}

/* One rank is late, but no circle closes: nothing happens. */
static void wait_for_latecomer(place *p) {
    letter l;
    if (p->rank == p->ranks - 1) sleep_ms(200);
    prepare_letter(&l, !p->rank, p->rank, p->rank ? 0 : 1, 1, 10, CONTIGUOUS);
    letter others[MOST_RANKS];
    for (int rank = 2; !p->rank && rank < p->ranks; rank++) {
        prepare_letter(&others[rank], true, 0, rank, 1, 10, CONTIGUOUS);
        start_letter(&others[rank], p->group);
    }
    EXPECT_EQUAL(un_message_run(p->group, &l.message, &forever), UN_OK);
    finish_letter(&l);
    for (int rank = 2; !p->rank && rank < p->ranks; rank++) await_letter(&others[rank], p->group);
}

static void run_out_of_time(place *p) {
    if (p->rank) {
        wait_for_failure(p);
    } else {
        letter l;
        prepare_letter(&l, false, 0, 1, 1, 10, CONTIGUOUS);
        l.message.timeout_ns = 150 * MILLISECOND_NS;
        EXPECT_EQUAL(un_message_run(p->group, &l.message, &forever), UN_TIMEOUT);
        free_side(&l.side);
    }
    EXPECT_EQUAL(un_group_failure(p->group).rank, 0);
    expect_failure(p, UN_TIMEOUT);
}

static int stop(void *argument) {
    int *pauses = argument;
    return ++*pauses == 2;
}

static void be_interrupted(place *p) {
    int pauses = 0;
    un_call hooks = {.timeout_ns = -1, .pause = stop, .argument = &pauses};
    un_status wanted = p->rank ? UN_ABORTED : UN_INTERRUPTED;
    letter l;
    prepare_letter(&l, true, p->rank, 1 - p->rank, 1, 1000, CONTIGUOUS);
    start_letter(&l, p->group);
    if (p->rank)
        while (!un_message_done(&l.message)) sleep_ms(1); /* to wait would close a circle */
    EXPECT_EQUAL(un_message_wait(p->group, &l.message, p->rank ? &forever : &hooks), wanted);
    free_side(&l.side);
    expect_failure(p, wanted);
}

/* Large messages in both directions, of which an abort may find any half done. Their memory is
 * freed as soon as they are over. */
static void *abort_soon(void *argument) {
    place *p = argument;
    sleep_ms(3);
    un_group_abort(p->group, "enough");
    return NULL;
}

static void be_aborted(place *p) {
    int right = (p->rank + 1) % p->ranks, left = (p->rank + p->ranks - 1) % p->ranks;
    pthread_t thread = start(abort_soon, p);
    for (un_status status = UN_OK; !status;) {
        letter out, in;
        prepare_letter(&out, true, p->rank, right, 1, 90000, CONTIGUOUS);
        prepare_letter(&in, false, p->rank, left, 1, 90000, CONTIGUOUS);
        start_letter(&out, p->group);
        start_letter(&in, p->group);
        status = un_message_wait(p->group, &in.message, &forever);
        if (!status) status = un_message_wait(p->group, &out.message, &forever);
        un_message_wait(p->group, &out.message, &forever);
        EXPECT(un_message_done(&in.message) && un_message_done(&out.message));
        EXPECT(!status || status == UN_ABORTED);
        free_side(&out.side);
        free_side(&in.side);
    }
    join(thread);
    expect_failure(p, UN_ABORTED);
}

static void be_left(place *p) {
    if (p->rank) return;
    run_in_vain(p, *(int *)p->shared, 1, 10, UN_PEER_CLOSED);
    expect_failure(p, UN_PEER_CLOSED);
}

/* To close a group ends what is under way in it. */
static void leave(place *p) {
    letter letters[2];
    for (int i = 0; i < 2; i++) {
        prepare_letter(&letters[i], i, p->rank, 1 - p->rank, 1 + p->rank, 1000, CONTIGUOUS);
        start_letter(&letters[i], p->group);
    }
    un_group_close(p->group);
    p->group = NULL;
    for (int i = 0; i < 2; i++) {
        EXPECT(un_message_done(&letters[i].message));
        EXPECT_EQUAL(letters[i].message.status, UN_ABORTED);
        free_side(&letters[i].side);
    }
}

void test_message_endings(void) {
    for (size_t items = 10; items < 1000; items *= 90) run_ranks(2, 4, send_unfit, &items);
    for (int sends = 0; sends < 2; sends++) {
        for (int ranks = 1; ranks <= 4; ranks++) run_ranks(ranks, 2, wait_in_circle, &sends);
        run_ranks(2, 4, be_left, &sends);
    }
    run_ranks(3, 1, write_late, NULL);
    run_ranks(3, 6, wait_for_latecomer, NULL);
    run_ranks(2, 1, run_out_of_time, NULL);
    run_ranks(2, 4, be_interrupted, NULL);
    for (int i = 0; i < 5; i++) run_ranks(3, i % 2 ? 1 : 6, be_aborted, NULL);
    run_ranks(2, 1, leave, NULL);
}
