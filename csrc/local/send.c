/* Sending: announcing messages, reading replies, and passing large messages through the ring. */
#include <stdlib.h>

#include "local/messages.h"
#include "base/records.h"
#include "base/segment.h"
#include "base/stream.h"

/* -- handles: numbers that identify announced messages -------------------------------------- */

uint64_t take_handle(struct traffic *t, un_message *m) {
    if (!t->free_handle) {
        uint32_t count = t->handle_count ? 2 * t->handle_count : 16;
        struct handle *more = realloc(t->handles, count * sizeof *more);
        if (!more) return 0;
        for (uint32_t i = t->handle_count; i < count; i++)
            more[i] = (struct handle){.next_free = i + 1 < count ? i + 2 : 0};
        t->free_handle = t->handle_count + 1;
        t->handles = more;
        t->handle_count = count;
    }
    uint32_t handle = t->free_handle;
    struct handle *h = &t->handles[handle - 1];
    t->free_handle = h->next_free;
    h->message = m;
    t->unanswered++;
    return handle;
}

un_message *give_handle_back(struct traffic *t, uint64_t handle) {
    if (!handle || handle > t->handle_count) return NULL;
    struct handle *h = &t->handles[handle - 1];
    un_message *m = h->message;
    if (!m) return NULL;
    *h = (struct handle){.next_free = t->free_handle};
    t->free_handle = (uint32_t)handle;
    t->unanswered--;
    return m;
}

/* -- the steps of a send ------------------------------------------------------------------------ */

bool fits_entry(const un_message *m) { return m->stream.bytes <= PAYLOAD_BYTES; }

bool is_eager(const un_group *g, const un_message *m) {
    return m->sends && (int64_t)m->stream.bytes <= g->messages.eager_bytes;
}

static un_status open_channel(un_group *g, int peer) {
    struct traffic *t = &g->messages.traffic[peer];
    if (t->channel_ready) return UN_OK;
    un_status status = prepare_channel(g, peer);
    if (status) return status;
    t->channel_ready = true;
    publish_to_peer(&opened_by(g, g->rank)[peer], 1);
    return UN_OK;
}

/* Announce what there is room for. */
bool announce_sends(un_group *g, int peer) {
    struct traffic *t = &g->messages.traffic[peer];
    channel *c = channel_of(g, g->rank, peer);
    bool moved = false;
    for (un_message *m; (m = t->sends.first); moved = true) {
        un_status status = open_channel(g, peer);
        if (status) {
            /* the receiver would wait */
            abort_group(g, UN_ABORTED, g->rank, read_word(&g->calls.latest));
            dequeue(&t->sends);
            complete(g, m, status);
            return true;
        }
        if (!has_room(g, peer, t->announced, &t->taken, &c->taken)) break;
        bool over = is_eager(g, m) && fits_entry(m);
        uint64_t handle = over ? 0 : take_handle(t, m);
        if (!over && !handle) break; /* no memory: later, perhaps */
        dequeue(&t->sends);
        entry *e = &c->entries[t->announced % ENTRIES];
        write_word(&e->handle, handle);
        write_word(&e->tag, (uint64_t)m->tag);
        write_word(&e->bytes, m->stream.bytes);
        atomic_store_explicit(&e->dtype, m->dtype, memory_order_relaxed);
        if (fits_entry(m)) stream_read(e->payload, &m->stream, 0, m->stream.bytes);
        m->phase = ANNOUNCED;
        publish_to_peer(&e->number, ++t->announced);
        ring_bell(g, peer);
        if (over) complete(g, m, UN_OK);
    }
    return moved;
}

static bool read_reply(un_group *g, int peer, const reply *r) {
    struct traffic *t = &g->messages.traffic[peer];
    uint64_t word = read_word(&r->word);
    un_message *m = give_handle_back(t, word >> 1);
    if (!m) return refuse_damage(g, peer);
    if ((word & 1) == TAKEN) {
        complete(g, m, UN_OK);
        return true;
    }
    if (t->passed) return refuse_damage(g, peer); /* one at a time goes through the ring */
    t->passed = m;
    enter_phase(g, m, MOVING);
    record_start(g, m->record);
    return true;
}

bool read_replies(un_group *g, int peer) {
    struct traffic *t = &g->messages.traffic[peer];
    channel *c = channel_of(g, g->rank, peer);
    uint64_t before = t->heard;
    for (;; t->heard++) {
        const reply *r = &c->replies[t->heard % ENTRIES];
        if (!has_come(g, peer, &r->number, t->heard + 1) || !read_reply(g, peer, r)) break;
    }
    if (t->heard == before) return false;
    publish_freed(g, peer, &c->heard, before, t->heard, false);
    return true;
}

bool put_into_ring(un_group *g, int peer) {
    struct traffic *t = &g->messages.traffic[peer];
    channel *c = channel_of(g, g->rank, peer);
    un_message *m = t->passed;
    bool moved = false;
    for (size_t piece; (piece = next_piece(m)); moved = true) {
        uint64_t ahead = t->written + m->moved - read_from_peer(&c->read);
        if (ahead > RING_BYTES) return refuse_damage(g, peer);
        if (ahead + piece > RING_BYTES) return moved;
        stream_read(c->ring + m->moved % RING_BYTES, &m->stream, m->moved, piece);
        m->moved += piece;
        publish_to_peer(&c->written, t->written + m->moved);
        ring_bell(g, peer);
    }
    t->written += m->stream.bytes;
    t->passed = NULL;
    complete(g, m, UN_OK);
    return true;
}

void start_sending(un_group *g, un_message *m) {
    if (is_elsewhere(g, m->peer)) {
        g->reach->send(g, m);
        return;
    }
    m->phase = TO_ANNOUNCE;
    enqueue(&g->messages.traffic[m->peer].sends, m);
}
