/* Values of a peer that make no sense, as a stray pointer of its program would leave them: the
 * group ends with that reason, and nothing outside of the messages is read or written. */
#include "internal.h"
#include "checked_messages.h"

static const un_call forever = {.timeout_ns = -1};

/* What rank 0 overwrites in its channel to rank 1, or as a receiver in that from rank 1. */
typedef void damage(channel *c);

static void write_too_much(channel *c) { atomic_store(&c->written, (uint64_t)1 << 40); }
static void write_too_little(channel *c) { atomic_store(&c->written, (uint64_t)-1000); }
static void read_too_much(channel *c) { atomic_store(&c->read, (uint64_t)1 << 40); }
static void write_reply(channel *c, uint64_t word) {
    atomic_store(&c->replies[0].word, word);
    atomic_store(&c->replies[0].number, 1);
}
static void reply_to_nobody(channel *c) { write_reply(c, (uint64_t)1 << 50); }
static void reply_to_zero(channel *c) { write_reply(c, 0); }
static void grant_early(channel *c) {
    read_too_much(c);
    write_reply(c, 3); /* the first message, by the ring */
}

/* Rank 0 sends a large message whose ring it damages, or damages the ring of one that it should
 * take. The other one finds out, and both end alike. */
static void find_damage(membership *me, damage *by_sender, damage *by_receiver) {
    checked_message m;
    bool sends = (me->rank == 0) == (by_sender != NULL);
    un_call all = barrier();
    prepare_message(&m, sends, me->rank, 1 - me->rank, 1, 70000, CONTIGUOUS);
    if (sends) start_message(&m, me->group);
    EXPECT_EQUAL(un_run(me->group, &all), UN_OK); /* the message is announced */
    if (me->rank == 0 && by_sender) by_sender(channel_of(me->group, 0, 1));
    if (me->rank == 0 && by_receiver) by_receiver(channel_of(me->group, 1, 0));
    EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
    if (!sends && me->rank) start_message(&m, me->group);
    if (sends || me->rank) {
        EXPECT_EQUAL(un_message_wait(me->group, &m.message, &forever), UN_DAMAGED);
    }
    while (!un_group_failure(me->group).status) sleep_ms(1);
    EXPECT_EQUAL(un_group_failure(me->group).status, UN_DAMAGED);
    EXPECT_EQUAL(un_group_failure(me->group).rank, 0);
    free_side(&m.side);
}

static void damage_as_sender(membership *me) { find_damage(me, *(damage **)me->shared, NULL); }
static void damage_as_receiver(membership *me) { find_damage(me, NULL, *(damage **)me->shared); }

/* Room for more entries than there are: the sender finds out once it needs it. */
static void take_too_much(membership *me) {
    checked_message first;
    un_call all = barrier();
    prepare_message(&first, me->rank, me->rank, 1 - me->rank, 1, 1, CONTIGUOUS);
    EXPECT_EQUAL(un_message_run(me->group, &first.message, &forever), UN_OK);
    free_side(&first.side);
    if (!me->rank) atomic_store(&channel_of(me->group, 1, 0)->taken, 5000);
    EXPECT_EQUAL(un_run(me->group, &all), UN_OK);
    checked_message *messages = calloc(ENTRIES, sizeof *messages);
    for (int i = 0; me->rank && i < ENTRIES; i++) {
        prepare_message(&messages[i], true, 1, 0, 1, 1, CONTIGUOUS);
        start_message(&messages[i], me->group);
    }
    while (!un_group_failure(me->group).status) sleep_ms(1);
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
        while (!un_group_failure(me->group).status) sleep_ms(1);
        return;
    }
    checked_message m;
    prepare_message(&m, false, 1, 0, 1, 1, CONTIGUOUS);
    m.message.timeout_ns = 300 * MILLISECOND_NS;
    EXPECT_EQUAL(un_message_run(me->group, &m.message, &forever), UN_TIMEOUT);
    EXPECT(!un_group_waiting(me->group, 0).waits);
    free_side(&m.side);
}

void test_damage(void) {
    static damage *const by_senders[] = {write_too_much, write_too_little};
    static damage *const by_receivers[] = {grant_early, reply_to_nobody, reply_to_zero};
    for (size_t i = 0; i < sizeof by_senders / sizeof *by_senders; i++)
        run_ranks(2, 4, damage_as_sender, (void *)(uintptr_t)&by_senders[i]);
    for (size_t i = 0; i < sizeof by_receivers / sizeof *by_receivers; i++)
        run_ranks(2, 4, damage_as_receiver, (void *)(uintptr_t)&by_receivers[i]);
    run_ranks(2, 4, take_too_much, NULL);
    run_ranks(2, 4, wait_for_nobody, NULL);
}
