/* Messages between hosts, from process to process.
 *
 * A message is announced with its data: a short one is sent as a copy, a long one stays with its
 * sender until its receive is posted, and is fetched then. A send is over once a receive matches
 * it. Its sender learns that from a reply; or, if a short receive was posted first, from the receive
 * itself, which is announced, too, and which both sides match with the same message: the first one
 * with its tag that its rank had not read. Arrivals wait in an inbox, since the thread that drives
 * the network may not touch a group's messages.
 */
#include <stdlib.h>

#include "hosts/hosts.h"
#include "local/messages.h"
#include "base/records.h"
#include "base/stream.h"

enum { EXPECTED_MOST = 4096 }; /* bytes of a receive that is announced */

/* Beside the handle: the send is over only with a reply, since its rank also sends messages that
 * are over at once. */
static const uint64_t REPLIES_ONLY = (uint64_t)1 << 32;

typedef struct moving { /* the data of a message in transit */
    transfer transfer;
    char *bounce;    /* where the user's memory is not contiguous */
    bool is_matched; /* a send's: its receiver has taken it */
} moving;

/* -- arriving: with the network's lock ----------------------------------------------------------- */

bool receive_message(hosts *hs, const wire *head, const void *data, size_t bytes,
                     remote_data *remote) {
    parcel *p = keep_parcel(head, data, bytes, remote);
    if (!p) return false;
    push_parcel(&hs->inbox, p);
    atomic_fetch_add(&hs->unread, 1);
    ring_bell(hs->group, hs->group->rank);
    return true;
}

/* -- sending --------------------------------------------------------------------------------------- */

static moving *begin_moving(un_group *g, un_message *m, int peer, bool copies) {
    moving *made = calloc(1, sizeof *made);
    if (made && copies && !(made->bounce = malloc(m->stream.bytes))) {
        free(made);
        made = NULL;
    }
    if (!made) {
        abort_group(g, UN_ABORTED, g->rank, read_word(&g->calls.latest));
        return NULL;
    }
    made->transfer.link = link_of(g, peer);
    m->moving = made;
    hosts_of(g)->transfers++;
    return made;
}

static bool replies_only(const un_group *g) { return g->messages.eager_bytes >= 0; }

/* Whether the peer waits for this message. */
static bool is_expected(un_group *g, const un_message *m) {
    parcel *p = find_parcel(&hosts_of(g)->of[m->peer].expected, m->peer, (uint64_t)m->tag);
    bool fits = p && p->head.words[2] == m->stream.bytes && p->head.extra == m->dtype;
    free(p);
    return fits;
}

static void start_sending_over(un_group *g, un_message *m) {
    hosts *hs = hosts_of(g);
    bool over = (is_eager(g, m) && fits_entry(m)) || is_expected(g, m);
    uint64_t handle = over ? 0 : take_handle(&g->messages.traffic[m->peer], m);
    if (!over && !handle) {
        abort_group(g, UN_ABORTED, g->rank, read_word(&g->calls.latest));
        return;
    }
    m->phase = ANNOUNCED;
    m->handle = handle;
    wire head = wire_of(g, WIRE_ENTRY);
    head.extra = m->dtype;
    head.number = m->match.number = ++hs->of[m->peer].entries_sent;
    head.words[0] = handle | (replies_only(g) ? REPLIES_ONLY : 0);
    head.words[1] = (uint64_t)m->tag;
    head.words[2] = m->stream.bytes;
    size_t bytes = m->stream.bytes;
    char *data = bytes ? stream_direct(&m->stream, 0, bytes) : NULL, *bounce = NULL;
    hs->reach.sent[m->peer]++;
    if (g->waiting.message) forget_waiting(g); /* our published traffic counts are out of date */
    if (bytes > EAGER_MOST) {
        moving *way = begin_moving(g, m, m->peer, !data);
        if (!way) return;
        if (!data) stream_read(data = way->bounce, &m->stream, 0, bytes);
        send_from(way->transfer.link, &head, data, bytes, &way->transfer);
        return;
    }
    if (bytes && !data) {
        if (!(bounce = malloc(bytes))) {
            abort_group(g, UN_ABORTED, g->rank, read_word(&g->calls.latest));
            return;
        }
        stream_read(data = bounce, &m->stream, 0, bytes);
    }
    send_copy_of(link_of(g, m->peer), &head, data, bytes);
    free(bounce);
    if (over) complete(g, m, UN_OK);
}

static void send_reply_over(un_group *g, int source, uint64_t handle) {
    wire head = wire_of(g, WIRE_REPLY);
    head.number = handle;
    g->reach->sent[source]++;
    send_copy_of(link_of(g, source), &head, NULL, 0);
}

/* A receive that no message has matched yet. One that follows another which its sender does not
 * know of is not announced: its sender could match it with the other's message. */
static void expect_over(un_group *g, un_message *m) {
    rank_of_hosts *r = &hosts_of(g)->of[m->peer];
    m->is_expected = m->stream.bytes <= EXPECTED_MOST && !g->messages.wanted_from_any &&
                     g->messages.traffic[m->peer].wanted == r->told;
    if (!m->is_expected) return;
    r->told++;
    wire head = wire_of(g, WIRE_EXPECT);
    head.extra = m->dtype;
    head.number = (uint64_t)m->tag;
    head.words[1] = r->entries_read;
    head.words[2] = m->stream.bytes;
    g->reach->sent[m->peer]++;
    if (g->waiting.message) forget_waiting(g);
    send_copy_of(link_of(g, m->peer), &head, NULL, 0);
}

/* A peer waits for a message: for the first one that it had not read then, or for one to come. */
static bool read_expected(un_group *g, parcel *p) {
    int peer = p->head.from;
    struct traffic *t = &g->messages.traffic[peer];
    if (replies_only(g)) return false;
    un_message *m = t->unanswered ? g->messages.oldest : NULL;
    while (m && !(m->sends && m->peer == peer && (uint64_t)m->tag == p->head.number &&
                  m->match.number > p->head.words[1]))
        m = m->next;
    if (!m) {
        push_parcel(&hosts_of(g)->of[peer].expected, p);
        return true;
    }
    if (p->head.words[2] != m->stream.bytes || p->head.extra != m->dtype) return false;
    give_handle_back(t, m->handle);
    complete(g, m, UN_OK);
    return false;
}

static void end_moving(un_group *g, un_message *m) {
    free(m->moving->bounce);
    free(m->moving);
    m->moving = NULL;
    hosts_of(g)->transfers--;
}

static void read_reply_over(un_group *g, const parcel *p) {
    un_message *m = give_handle_back(&g->messages.traffic[p->head.from], p->head.number);
    if (!m)
        refuse_damage(g, p->head.from);
    else if (m->moving)
        m->moving->is_matched = true; /* its memory may still be in use */
    else
        complete(g, m, UN_OK);
}

/* -- receiving ------------------------------------------------------------------------------------- */

/* A receive has its message. True: it is over, and needs a reply. */
static bool receive_parcel(un_group *g, un_message *m, parcel *p) {
    if (m->is_expected) hosts_of(g)->of[p->head.from].told--;
    if (!p->remote) {
        bool replies = !m->is_expected || p->head.words[0] & REPLIES_ONLY;
        if (p->bytes) stream_write(&m->stream, 0, p->data, p->bytes, false);
        complete(g, m, UN_OK);
        return replies;
    }
    char *to = stream_direct(&m->stream, 0, p->bytes);
    moving *way = begin_moving(g, m, p->head.from, !to);
    if (!way) return false;
    m->phase = MOVING;
    fetch_to(p->remote, to ? to : way->bounce, p->bytes, &way->transfer);
    p->remote = NULL;
    return false;
}

static void take_entry_over(un_group *g, parcel *p) {
    hosts_of(g)->of[p->head.from].entries_read++;
    take_arrived(g, &(arrival){.match = {.tag = (int64_t)p->head.words[1], .source = p->head.from},
                               .handle = (uint32_t)p->head.words[0],
                               .bytes = p->bytes,
                               .dtype = p->head.extra,
                               .parcel = p});
}

/* UCX does not guarantee order between its protocols. */
static void read_parcel(un_group *g, parcel *p) {
    hosts *hs = hosts_of(g);
    int from = p->head.from;
    hs->reach.had[from]++;
    if (p->head.kind == WIRE_REPLY) {
        read_reply_over(g, p);
        drop_parcel(p);
    } else if (p->head.kind == WIRE_EXPECT) {
        if (!read_expected(g, p)) drop_parcel(p);
    } else if (p->head.number != hs->of[from].entries_read + 1) {
        push_parcel(&hs->of[from].ahead, p);
    } else {
        do take_entry_over(g, p);
        while ((p = find_parcel(&hs->of[from].ahead, from, hs->of[from].entries_read + 1)));
    }
}

static bool look_at_transfers(un_group *g) {
    bool moved = false;
    for (un_message *m = g->messages.oldest, *next; m; m = next) {
        next = m->next;
        if (!m->moving || atomic_load(&m->moving->transfer.state) != HAS_LANDED) continue;
        if (m->sends && !m->moving->is_matched) continue;
        if (!m->sends && m->moving->bounce)
            stream_write(&m->stream, 0, m->moving->bounce, m->stream.bytes, false);
        end_moving(g, m);
        if (!m->sends && m->handle) send_reply_over(g, m->source, m->handle);
        complete(g, m, UN_OK);
        moved = true;
    }
    return moved;
}

static bool progress_over_hosts(un_group *g) {
    hosts *hs = hosts_of(g);
    bool moved = false;
    (hs->transfers ? drive_network : poll_network)();
    if (atomic_load(&hs->unread)) {
        lock_network();
        parcel_queue come = hs->inbox;
        hs->inbox = (parcel_queue){0};
        atomic_store(&hs->unread, 0);
        unlock_network();
        for (parcel *p; (p = take_parcel(&come)); moved = true) read_parcel(g, p);
    }
    return (hs->transfers && look_at_transfers(g)) || moved;
}

/* -- the end ----------------------------------------------------------------------------------------- */

/* The group is over: our memory must not be read or written once its messages have failed. */
static void finish_messages(un_group *g) {
    for (un_message *m = g->messages.oldest; hosts_of(g)->transfers && m; m = m->next) {
        if (!m->moving) continue;
        await_end(&m->moving->transfer);
        end_moving(g, m);
    }
}

void forget_parcels(un_group *g) {
    const match_table *t = &g->messages.unmatched;
    size_t size = t->buckets ? t->size : FEW_BUCKETS;
    const match_bucket *buckets = t->buckets ? t->buckets : t->few;
    for (size_t i = 0; t->count && i < size; i++)
        for (un_match *match = buckets[i].first; match; match = match->next) {
            arrival *a = (arrival *)match;
            if (a->parcel) drop_parcel(a->parcel);
            a->parcel = NULL;
        }
    for (int rank = 0; rank < g->ranks; rank++) {
        drop_parcels(&hosts_of(g)->of[rank].ahead);
        drop_parcels(&hosts_of(g)->of[rank].expected);
    }
}

void reach_messages(reach *r) {
    r->send = start_sending_over;
    r->expect = expect_over;
    r->reply = send_reply_over;
    r->receive = receive_parcel;
    r->drop = drop_parcel;
    r->progress = progress_over_hosts;
    r->finish = finish_messages;
    r->release = release_messages;
}
