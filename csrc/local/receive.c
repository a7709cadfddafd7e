/* Receiving: reading announcements, matching receives, and replying. */
#include <stdlib.h>

#include "local/messages.h"
#include "base/records.h"
#include "base/stream.h"

enum { KEPT = 1024 }; /* unexpected messages of one rank, unless a receive waits for others */

static bool has_room_for_reply(un_group *g, int source) {
    if (is_elsewhere(g, source)) return true;
    struct traffic *t = &g->messages.traffic[source];
    return has_room(g, source, t->replied, &t->replies_heard,
                    &channel_of(g, source, g->rank)->heard);
}

/* There must be room. */
static void write_reply(un_group *g, int source, uint64_t handle, enum verdict verdict) {
    if (is_elsewhere(g, source)) {
        g->reach->reply(g, source, handle);
        return;
    }
    struct traffic *t = &g->messages.traffic[source];
    reply *r = &channel_of(g, source, g->rank)->replies[t->replied % ENTRIES];
    write_word(&r->word, handle << 1 | verdict);
    publish_to_peer(&r->number, ++t->replied);
    ring_bell(g, source);
}

/* The next large message has the ring to itself. */
bool grant_next(un_group *g, int source) {
    struct traffic *t = &g->messages.traffic[source];
    un_message *m = t->receives.first;
    if (!m || m->phase == MOVING || !has_room_for_reply(g, source)) return false;
    m->phase = MOVING;
    write_reply(g, source, m->handle, GRANTED);
    return true;
}

/* A receive has its message. True: it is over, and its sender waits for a reply. */
static bool deliver(un_group *g, un_message *m, const arrival *a, const char *payload) {
    int source = a->match.source;
    bool small = a->bytes <= PAYLOAD_BYTES;
    m->source = source;
    m->seen_bytes = a->bytes;
    m->seen_dtype = a->dtype;
    m->handle = a->handle;
    record_start(g, m->record);
    enter_phase(g, m, TO_GRANT);
    if (a->bytes != m->stream.bytes || a->dtype != m->dtype) {
        note_unfit(g, m);
        abort_unfit(g, source, a->handle);
        complete(g, m, UN_UNFIT);
    } else if (a->parcel) {
        return g->reach->receive(g, m, a->parcel) && a->handle;
    } else if (small) {
        stream_write(&m->stream, 0, payload, a->bytes, false);
        complete(g, m, UN_OK);
        return a->handle != 0;
    } else {
        enqueue(&g->messages.traffic[source].receives, m);
    }
    return false;
}

/* Receives that have their message, but had no room to reply to its sender. */
bool deliver_what_is_due(un_group *g, int source) {
    struct traffic *t = &g->messages.traffic[source];
    bool moved = false;
    for (un_message *m; (m = t->due.first) && has_room_for_reply(g, source); moved = true) {
        arrival *a = (arrival *)m->match.next;
        dequeue(&t->due);
        if (deliver(g, m, a, a->payload)) write_reply(g, source, a->handle, TAKEN);
        if (a->parcel) g->reach->drop(a->parcel);
        free(a);
    }
    return moved;
}

static un_message *message_of(un_match *match) {
    return (un_message *)(void *)((char *)match - offsetof(un_message, match));
}

/* The oldest receive that matches this message, which has it from now on. */
static un_message *take_receive(un_group *g, int source, int64_t tag) {
    struct traffic *t = &g->messages.traffic[source];
    un_match *own = t->wanted ? find_match(&g->messages.wanted, source, tag) : NULL;
    un_match *any = g->messages.wanted_from_any ? find_match(&g->messages.wanted, -1, tag) : NULL;
    if (!own && !any) return NULL;
    bool first_is_any = any && (!own || any->number < own->number);
    *(first_is_any ? &g->messages.wanted_from_any : &t->wanted) -= 1;
    return message_of(take_match(&g->messages.wanted, first_is_any ? -1 : source, tag));
}

/* Keep an unexpected message. False: it must wait where it is, so that a sender whose messages
 * match no receive does not fill our memory; a search for another message must look past it. */
static bool keep_unmatched(un_group *g, const arrival *seen, const char *payload) {
    struct traffic *t = &g->messages.traffic[seen->match.source];
    bool may_wait = !seen->parcel;
    if (may_wait && t->unmatched >= KEPT && !t->wanted && !g->messages.wanted_from_any)
        return false;
    size_t bytes = !seen->parcel && seen->bytes <= PAYLOAD_BYTES ? seen->bytes : 0;
    arrival *kept = malloc(sizeof *kept + bytes);
    if (!kept) return false;
    memcpy(kept, seen, sizeof *kept);
    if (bytes) memcpy(kept->payload, payload, bytes);
    kept->match.number = ++g->messages.matches;
    add_match(&g->messages.unmatched, &kept->match);
    t->unmatched++;
    return true;
}

static bool take_entry(un_group *g, int source, const entry *e) {
    arrival seen = {.match = {.tag = (int64_t)read_word(&e->tag), .source = source},
                    .handle = read_word(&e->handle),
                    .bytes = read_word(&e->bytes),
                    .dtype = atomic_load_explicit(&e->dtype, memory_order_relaxed)};
    if (!has_room_for_reply(g, source)) return false;
    un_message *m = take_receive(g, source, seen.match.tag);
    if (!m) return keep_unmatched(g, &seen, e->payload);
    if (deliver(g, m, &seen, e->payload)) write_reply(g, source, seen.handle, TAKEN);
    return true;
}

void take_arrived(un_group *g, const arrival *seen) {
    un_message *m = take_receive(g, seen->match.source, seen->match.tag);
    if (!m && keep_unmatched(g, seen, NULL)) return;
    if (!m) abort_group(g, UN_ABORTED, g->rank, 0); /* no memory */
    if (m && deliver(g, m, seen, NULL)) write_reply(g, seen->match.source, seen->handle, TAKEN);
    g->reach->drop(seen->parcel);
}

bool take_entries(un_group *g, int source) {
    struct traffic *t = &g->messages.traffic[source];
    channel *c = channel_of(g, source, g->rank);
    uint64_t before = t->entries_read;
    bool left_some = false;
    for (;; t->entries_read++) {
        const entry *e = &c->entries[t->entries_read % ENTRIES];
        if (!has_come(g, source, &e->number, t->entries_read + 1)) break;
        left_some = !take_entry(g, source, e);
        if (left_some) break;
    }
    if (t->entries_read == before) return false;
    publish_freed(g, source, &c->taken, before, t->entries_read, left_some);
    return true;
}

bool take_from_ring(un_group *g, int source) {
    struct traffic *t = &g->messages.traffic[source];
    channel *c = channel_of(g, source, g->rank);
    un_message *m = t->receives.first;
    bool moved = false;
    if (!m || m->phase != MOVING) return false;
    for (; m->moved < m->stream.bytes; moved = true) {
        uint64_t there = read_from_peer(&c->written) - (t->read + m->moved);
        size_t at = m->moved % RING_BYTES, piece = next_piece(m);
        if (!there) return moved;
        if (there > RING_BYTES) return refuse_damage(g, source);
        if (piece > there) piece = there;
        if (piece > RING_BYTES - at) piece = RING_BYTES - at;
        stream_write(&m->stream, m->moved, c->ring + at, piece, false);
        m->moved += piece;
        publish_to_peer(&c->read, t->read + m->moved);
        ring_bell(g, source);
    }
    t->read += m->stream.bytes;
    dequeue(&t->receives);
    complete(g, m, UN_OK);
    grant_next(g, source);
    return true;
}

/* The source of the oldest unexpected message with this tag; -1: none. */
static int oldest_source(un_group *g, int64_t tag) {
    const un_match *oldest = NULL;
    for (int rank = 0; g->messages.unmatched.count && rank < g->ranks; rank++) {
        const un_match *found = find_match(&g->messages.unmatched, rank, tag);
        if (found && (!oldest || found->number < oldest->number)) oldest = found;
    }
    return oldest ? oldest->source : -1;
}

/* The oldest unexpected message with this tag. */
static arrival *take_arrival(un_group *g, int source, int64_t tag) {
    if (source < 0) source = oldest_source(g, tag);
    if (source < 0) return NULL;
    arrival *a = (arrival *)take_match(&g->messages.unmatched, source, tag);
    if (a) g->messages.traffic[source].unmatched--;
    return a;
}

void start_receiving(un_group *g, un_message *m) {
    arrival *a = take_arrival(g, m->peer, m->tag);
    if (!a) {
        m->phase = WANTED;
        if (m->peer >= 0 && is_elsewhere(g, m->peer)) g->reach->expect(g, m);
        m->match = (un_match){.number = ++g->messages.matches, .tag = m->tag, .source = m->peer};
        add_match(&g->messages.wanted, &m->match);
        *(m->peer < 0 ? &g->messages.wanted_from_any : &g->messages.traffic[m->peer].wanted) += 1;
        return;
    }
    m->phase = TO_REPLY;
    m->source = a->match.source;
    m->match.next = &a->match;
    enqueue(&g->messages.traffic[m->source].due, m);
    deliver_what_is_due(g, m->source);
}
