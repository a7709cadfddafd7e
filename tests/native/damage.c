/* Invalid values from a peer, as a stray pointer of its program would leave them: the
 * group ends with that reason, and nothing outside of the messages is read or written. */
#include "base/group.h"
#include "checked_messages.h"

static const un_call forever = {.timeout_ns = -1};

/* What rank 0 overwrites in its channel to rank 1, or as a receiver in that from rank 1. */
typedef void damage(channel *c);

static void write_too_much(channel *c) { atomic_store(&c->written, (uint64_t)1 << 40); }
static void write_too_little(channel *c) { atomic_store(&c->written, (uint64_t)-1000); }
static void announce_another(channel *c) { atomic_store(&c->entries[0].number, 7); }
static void read_too_much(channel *c) { atomic_store(&c->read, (uint64_t)1 << 40); }
static void write_reply(channel *c, uint64_t word) {
    atomic_store(&c->replies[0].word, word);
    atomic_store(&c->replies[0].number, 1);
}
static void reply_to_nobody(channel *c) { write_reply(c, (uint64_t)1 << 50); }
static void reply_to_zero(channel *c) { write_reply(c, 0); }
static void reply_to_another(channel *c) { atomic_store(&c->replies[0].number, 7); }
static void grant_early(channel *c) {
    read_too_much(c);
    write_reply(c, 3); /* the first message, by the ring */
}

typedef struct damaging {
    damage *how;
    bool by_sender;
    _Atomic bool announced, damaged;
} damaging;

static void wait_for(_Atomic bool *event) {
    while (!atomic_load(event)) sleep_ms(1);
}

static void wait_for_failure(const membership *me) {
    while (!un_group_failure(me->group).status) sleep_ms(1);
}

/* Rank 0 sends a large message and damages its channel, or damages the channel of one that it should
 * take. The other one finds out, and both end alike. No call of the engine brings the ranks together:
 * it would fail as soon as the damage is found. */
static void find_damage(membership *me) {
    damaging *d = me->shared;
    checked_message m;
    bool sends = (me->rank == 0) == d->by_sender;
    prepare_message(&m, sends, me->rank, 1 - me->rank, 1, 70000, CONTIGUOUS);
    if (sends) {
        start_message(&m, me->group);
        atomic_store(&d->announced, true);
    } else if (me->rank) {
        wait_for(&d->damaged);
        start_message(&m, me->group);
    }
    if (!me->rank) {
        wait_for(&d->announced);
        /* Our progress thread would mend a word of ours by writing its next value over it. */
        pthread_mutex_lock(&me->group->messages.lock);
        d->how(channel_of(me->group, !d->by_sender, d->by_sender));
        atomic_store(&d->damaged, true);
        wait_for_failure(me);
        pthread_mutex_unlock(&me->group->messages.lock);
    }
    if (sends || me->rank)
        EXPECT_EQUAL(un_message_wait(me->group, &m.message, &forever), UN_DAMAGED);
    EXPECT_EQUAL(un_group_failure(me->group).status, UN_DAMAGED);
    EXPECT_EQUAL(un_group_failure(me->group).rank, 0);
    free_side(&m.side);
}

/* Room for more entries than there are: the sender finds out once it needs it. */
static void take_too_much(membership *me) {
    _Atomic bool *damaged = me->shared;
    checked_message first;
    prepare_message(&first, me->rank, me->rank, 1 - me->rank, 1, 1, CONTIGUOUS);
    EXPECT_EQUAL(un_message_run(me->group, &first.message, &forever), UN_OK);
    free_side(&first.side);
    if (!me->rank) {
        atomic_store(&channel_of(me->group, 1, 0)->taken, 5000);
        atomic_store(damaged, true);
    }
    wait_for(damaged);
    checked_message *messages = calloc(ENTRIES, sizeof *messages);
    for (int i = 0; me->rank && i < ENTRIES; i++) {
        prepare_message(&messages[i], true, 1, 0, 1, 1, CONTIGUOUS);
        start_message(&messages[i], me->group);
    }
    wait_for_failure(me);
    EXPECT_EQUAL(un_group_failure(me->group).status, UN_DAMAGED);
    EXPECT_EQUAL(un_group_failure(me->group).rank, 0);
    for (int i = 0; me->rank && i < ENTRIES; i++) {
        un_message_wait(me->group, &messages[i].message, &forever);
        free_side(&messages[i].side);
    }
    free(messages);
}

/* A note that sends whoever follows it out of the segment. */
static void wait_for_nobody(membership *me) {
    if (!me->rank) {
        atomic_store(&control_of(me->group, 0)->waiting, (uint64_t)7 << 32 | 1 << 18 | 0xffff);
        wait_for_failure(me);
        return;
    }
    checked_message m;
    prepare_message(&m, false, 1, 0, 1, 1, CONTIGUOUS);
    m.message.timeout_ns = 300 * MILLISECOND_NS;
    EXPECT_EQUAL(un_message_run(me->group, &m.message, &forever), UN_TIMEOUT);
    EXPECT(!un_group_state(me->group, 0, 0).waiting.waits);
    free_side(&m.side);
}

void test_damage(void) {
    static damage *const all[] = {write_too_much,  write_too_little, announce_another, grant_early,
                                  reply_to_nobody, reply_to_zero,    reply_to_another};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        damaging d = {.how = all[i], .by_sender = i < 3};
        run_ranks(2, 4, find_damage, &d);
    }
    _Atomic bool damaged = false;
    run_ranks(2, 4, take_too_much, &damaged);
    run_ranks(2, 4, wait_for_nobody, NULL);
}
