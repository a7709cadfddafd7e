/* Channels: one for each ordered pair of ranks.
 *
 * A sender announces a message in the next entry of its channel; the entry holds the data of a
 * small one. The receiver reads entries in order, and copies unexpected messages to its own memory
 * so that the entry is soon free again. Once a receive matches, the receiver replies: it took a
 * small message, or it grants a large one the channel's ring, through which the sender passes it in
 * pieces. A send is over once its message is matched and its buffer is free.
 *
 * What a peer wrote is read once and validated before use.
 */
#include <stdio.h>
#include <stdlib.h>

#include "local/messages.h"
#include "base/records.h"

void ring_bell(un_group *g, int rank) {
    control *c = control_of(g, rank);
    if (!atomic_load_explicit(&c->listeners, memory_order_seq_cst)) return;
    atomic_fetch_add_explicit(&c->doorbell, 1, memory_order_seq_cst);
    wake(&c->doorbell, OF_RANKS, INT_MAX);
}

/* No peer of this build can have written what we read: the segment is damaged. Always false. */
bool refuse_damage(un_group *g, int peer) {
    abort_group(g, UN_DAMAGED, peer, 0);
    return false;
}

/* Whether one of the ENTRIES slots is free: `used` were used so far, and `freed` of them freed. */
bool has_room(un_group *g, int peer, uint64_t used, uint64_t *freed, const flag_t *word) {
    if (used - *freed < ENTRIES) return true;
    uint64_t now = read_from_peer(word);
    if (used - now > ENTRIES) return refuse_damage(g, peer);
    *freed = now;
    return used - now < ENTRIES;
}

/* Publish how many slots we have read so far. A peer that found no room may be asleep if there
 * were many, or if we left some; otherwise it need not be woken. */
void publish_freed(un_group *g, int peer, flag_t *word, uint64_t before, uint64_t now,
                   bool left_some) {
    if (now - before < ENTRIES / 2 && !left_some) {
        atomic_store_explicit(word, now, memory_order_release);
        return;
    }
    publish_to_peer(word, now);
    ring_bell(g, peer);
}

/* -- messages under way ------------------------------------------------------------------------ */

void enqueue(message_queue *q, un_message *m) {
    m->behind = NULL;
    if (q->last)
        q->last->behind = m;
    else
        q->first = m;
    q->last = m;
}

void dequeue(message_queue *q) {
    q->first = q->first->behind;
    if (!q->first) q->last = NULL;
}

/* Deadlock detection must not find our note after its message has arrived: the note is removed
 * before we publish that we have read the message. */
void enter_phase(un_group *g, un_message *m, enum phase phase) {
    m->phase = phase;
    if (g->waiting.message == m) forget_waiting(g);
}

void complete(un_group *g, un_message *m, un_status status) {
    *(m->previous ? &m->previous->next : &g->messages.oldest) = m->next;
    *(m->next ? &m->next->previous : &g->messages.newest) = m->previous;
    if (!status && g->waiting.message == m) forget_waiting(g); /* a failure's note stays readable */
    record_end(g, m->record, status);
    if (m->is_copy) {
        free(m);
        return;
    }
    m->status = status;
    atomic_store_explicit(&m->done, 1, memory_order_release); /* its owner may free it now */
}

/* -- progress ---------------------------------------------------------------------------------- */

/* For the error texts of all ranks: what this side of a mismatched message expected. */
void note_unfit(un_group *g, const un_message *m) {
    char text[UN_TEXT_BYTES];
    snprintf(text, sizeof text, "%lld %llu %u %llu %u ", (long long)m->tag,
             (unsigned long long)m->stream.bytes, (unsigned)m->dtype,
             (unsigned long long)m->seen_bytes, (unsigned)m->seen_dtype);
    write_shape_note(g, text, m->shape, UN_ABOUT_MESSAGES);
    if (m->site) un_group_write_note(g, UN_SITE, UN_ABOUT_MESSAGES, m->site->text);
}

COLD static void note_unfit_send(un_group *g) {
    int receiver;
    uint64_t handle = unfit_handle(g, &receiver);
    if (!handle) return;
    const struct traffic *t = &g->messages.traffic[receiver];
    const un_message *m = handle <= t->handle_count ? t->handles[handle - 1].message : NULL;
    if (m) note_unfit(g, m);
}

/* The group is over, and every message with it. Unexpected messages stay, for error texts. */
static bool complete_all(un_group *g, un_status status) {
    if (!g->messages.oldest) return false;
    note_unfit_send(g);
    if (g->reach) g->reach->finish(g);
    for (int rank = 0; rank < g->ranks; rank++)
        for (un_message *m = g->messages.traffic[rank].due.first; m; m = m->behind)
            free(m->match.next);
    while (g->messages.oldest) complete(g, g->messages.oldest, status);
    clear_matches(&g->messages.wanted, false);
    g->messages.wanted_from_any = 0;
    for (int rank = 0; rank < g->ranks; rank++) {
        struct traffic *t = &g->messages.traffic[rank];
        t->sends = t->due = t->receives = (message_queue){0};
        t->passed = NULL;
        t->unanswered = t->wanted = 0;
        free(t->handles);
        t->handles = NULL;
        t->handle_count = t->free_handle = 0;
    }
    return true;
}

static bool is_open(un_group *g, int source) {
    struct traffic *t = &g->messages.traffic[source];
    if (!t->open) t->open = read_from_peer(&opened_by(g, source)[g->rank]);
    return t->open;
}

bool progress(un_group *g) {
    un_status failed = status_from_abort(g);
    if (failed && g->reach) g->reach->release(g);
    if (failed) return complete_all(g, failed);
    bool moved = g->reach && g->reach->progress(g);
    for (int rank = 0; rank < g->ranks; rank++) { /* first what peers wait for */
        struct traffic *t = &g->messages.traffic[rank];
        if (t->sends.first) moved |= announce_sends(g, rank);
        if (!is_open(g, rank)) continue;
        if (t->due.first) moved |= deliver_what_is_due(g, rank);
        moved |= take_entries(g, rank);
        if (t->receives.first) moved |= grant_next(g, rank);
    }
    for (int rank = 0; rank < g->ranks; rank++) {
        struct traffic *t = &g->messages.traffic[rank];
        if (t->unanswered) moved |= read_replies(g, rank);
        if (t->passed) moved |= put_into_ring(g, rank);
        if (t->receives.first) moved |= take_from_ring(g, rank);
    }
    return moved;
}

bool make_traffic(un_group *g) {
    g->messages.traffic = calloc((size_t)g->ranks, sizeof *g->messages.traffic);
    return g->messages.traffic != NULL;
}

void free_traffic(un_group *g) {
    struct traffic *traffic = g->messages.traffic;
    for (int rank = 0; traffic && rank < g->ranks; rank++) free(traffic[rank].handles);
    clear_matches(&g->messages.wanted, false);
    clear_matches(&g->messages.unmatched, true);
    free(traffic);
}

/* -- for waiting threads and error texts ------------------------------------------------------- */

/* Reading this word is faster than a round of progress. Only a hint: other threads move the
 * message too. */
awaited awaited_word(const un_group *g, const un_message *m) {
    if (m->source < 0 || is_elsewhere(g, m->source)) return (awaited){0};
    if (m->sends) {
        const struct traffic *t = &g->messages.traffic[m->peer];
        const channel *c = channel_of(g, g->rank, m->peer);
        if (m->phase == ANNOUNCED)
            return (awaited){&c->replies[t->heard % ENTRIES].number, t->heard + 1};
        if (m->phase == MOVING)
            return (awaited){&c->read, t->written + m->moved + next_piece(m) - RING_BYTES};
        return t->channel_ready ? (awaited){&c->taken, t->taken + 1} : (awaited){0};
    }
    const struct traffic *t = &g->messages.traffic[m->source];
    if (m->phase == WANTED && !t->open) return (awaited){&opened_by(g, m->peer)[g->rank], 1};
    const channel *c = channel_of(g, m->source, g->rank);
    if (m->phase == WANTED)
        return (awaited){&c->entries[t->entries_read % ENTRIES].number, t->entries_read + 1};
    if (m->phase == TO_REPLY) return (awaited){&c->heard, t->replies_heard + 1};
    return (awaited){&c->written, t->read + t->receives.first->moved + 1};
}

/* For deadlock.c: whether messages, or replies to them, that the other rank wrote are unread. */
bool has_unread(const un_group *g, int from, int to, bool replies) {
    if (!read_from_peer(&opened_by(g, from)[to])) return false;
    const channel *c = channel_of(g, from, to);
    uint64_t read = read_from_peer(replies ? &c->heard : &c->taken);
    const flag_t *next = replies ? &c->replies[read % ENTRIES].number
                                 : &c->entries[read % ENTRIES].number;
    return read_from_peer(next) > read;
}

uint64_t un_group_unmatched(un_group *g, int source, int64_t *tag) {
    if (group_is_inherited(g)) return 0;
    pthread_mutex_lock(&g->messages.lock);
    const un_match *oldest = oldest_from(&g->messages.unmatched, source);
    uint64_t count = source < 0 ? g->messages.unmatched.count
                                : g->messages.traffic[source].unmatched;
    if (oldest) *tag = oldest->tag;
    pthread_mutex_unlock(&g->messages.lock);
    return count;
}
