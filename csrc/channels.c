/* Channels: one for each ordered pair of ranks, matched first-in first-out by tag.
 *
 * A sender announces a message in one of its channel's entries; a small one is already there with
 * it. The receiver takes the oldest announced message with its tag: a small one by
 * copying it, a large one by granting it, upon which the sender passes it on through the
 * channel's ring in pieces. A send is over once its message is matched and out of its hands.
 */
#include <stdlib.h>

#include "messages.h"

enum { PIECE_BYTES = RING_BYTES / 4 };

enum verdict { GRANTED = 1, TAKEN, UNFIT }; /* what a receiver writes beside a message's number */

enum phase { TO_ANNOUNCE, TO_MATCH = TO_ANNOUNCE, ANNOUNCED, MOVING };

/* Changed with the lock alone, but a hint to those who wait without it: what belongs to a phase
 * must be there before it. */
static enum phase phase_of(const un_message *m) {
    return (enum phase)atomic_load_explicit(&m->phase, memory_order_acquire);
}

static void set_phase(un_message *m, enum phase phase) {
    atomic_store_explicit(&m->phase, phase, memory_order_release);
}

void start_phases(un_message *m) {
    m->moved = 0;
    m->number = 0;
    set_phase(m, TO_ANNOUNCE);
}

static entry *entry_of(const un_group *g, int from, int to, uint64_t number) {
    return &channel_of(g, from, to)->entries[number % ENTRIES];
}

/* Before ring_bell, see there. */
static void publish_to_peer(flag_t *flag, uint64_t value) {
    atomic_store_explicit(flag, value, memory_order_seq_cst);
}

static bool answered(const entry *e, uint64_t number, enum verdict *verdict) {
    uint64_t answer = atomic_load_explicit(&e->answer, memory_order_acquire);
    *verdict = (enum verdict)(answer & 3);
    return answer >> 2 == number;
}

static void answer(entry *e, uint64_t number, enum verdict verdict) {
    publish_to_peer(&e->answer, number << 2 | verdict);
}

/* A peer that looks at its messages finds what we published by itself; the bell is for one that
 * sleeps. We publish and then look whether it listens; it says that it listens and then looks at
 * its messages once more. All four are sequentially consistent, so that one of us sees the other. */
void ring_bell(un_group *g, int rank) {
    control *c = control_of(g, rank);
    if (!atomic_load_explicit(&c->listeners, memory_order_seq_cst)) return;
    atomic_fetch_add_explicit(&c->doorbell, 1, memory_order_seq_cst);
    wake_listeners(c);
}

/* How far a message got. One that is over is told to its owner only once it is off the list. */
typedef enum { STUCK, MOVED, OVER } progress_made;

static progress_made over(un_message *m, un_status status) {
    m->status = status;
    return OVER;
}

/* -- sending ----------------------------------------------------------------------------------- */

static progress_made announce(un_group *g, un_message *m) {
    uint64_t number = g->counters[m->peer].sent + 1;
    entry *e = entry_of(g, g->rank, m->peer, number);
    enum verdict verdict;
    bool *full = &g->counters[m->peer].full;
    if (number > ENTRIES && !(answered(e, number - ENTRIES, &verdict) && verdict == TAKEN))
        *full = true;
    if (*full) return STUCK; /* and so are all after it, lest they overtake */
    un_status status = prepare_channel(g, m->peer);
    if (status) {
        abort_group(g, UN_ABORTED, g->rank, read_word(&g->calls)); /* the receiver would wait */
        return over(m, status);
    }
    atomic_store_explicit(&e->tag, m->tag, memory_order_relaxed);
    e->bytes = m->stream.bytes;
    e->dtype = m->dtype;
    atomic_store_explicit(&e->moved_in, 0, memory_order_relaxed);
    atomic_store_explicit(&e->moved_out, 0, memory_order_relaxed);
    if (e->bytes <= sizeof e->payload) stream_read(e->payload, &m->stream, 0, e->bytes);
    g->counters[m->peer].sent = m->number = number;
    set_phase(m, ANNOUNCED);
    publish_to_peer(&announced_by(g, g->rank)[m->peer], number);
    ring_bell(g, m->peer);
    return MOVED;
}

static progress_made pass_on(un_group *g, un_message *m) {
    entry *e = entry_of(g, g->rank, m->peer, m->number);
    char *ring = channel_of(g, g->rank, m->peer)->ring;
    progress_made made = STUCK;
    while (m->moved < m->stream.bytes) {
        size_t piece = m->stream.bytes - m->moved;
        if (piece > PIECE_BYTES) piece = PIECE_BYTES;
        uint64_t taken = atomic_load_explicit(&e->moved_out, memory_order_acquire);
        if (m->moved - taken + piece > RING_BYTES) return made;
        stream_read(ring + m->moved % RING_BYTES, &m->stream, m->moved, piece);
        m->moved += piece;
        publish_to_peer(&e->moved_in, m->moved);
        ring_bell(g, m->peer);
        made = MOVED;
    }
    return over(m, UN_OK);
}

bool fits_entry(const un_message *m) {
    return m->stream.bytes <= sizeof((entry *)0)->payload;
}

bool is_eager(const un_group *g, const un_message *m) {
    return m->sends && (int64_t)m->stream.bytes <= g->eager_bytes;
}

static progress_made send_step(un_group *g, un_message *m) {
    if (phase_of(m) == TO_ANNOUNCE) {
        progress_made made = announce(g, m);
        return made == MOVED && is_eager(g, m) && fits_entry(m) ? over(m, UN_OK) : made;
    }
    if (phase_of(m) == MOVING) return pass_on(g, m);
    enum verdict verdict;
    if (!answered(entry_of(g, g->rank, m->peer, m->number), m->number, &verdict)) return STUCK;
    if (verdict != GRANTED) return over(m, verdict == TAKEN ? UN_OK : UN_UNFIT);
    set_phase(m, MOVING);
    record_start(g, m->record);
    return pass_on(g, m);
}

/* -- receiving --------------------------------------------------------------------------------- */

/* The oldest message from `source` with this tag that nobody has taken; 0: none. Who looks for a
 * deadlock may ask for two other ranks, and see an entry that its sender is about to use again. */
static uint64_t find_message(const un_group *g, int source, int to, int64_t tag, uint64_t first,
                             uint64_t last) {
    enum verdict verdict;
    for (uint64_t number = first; number <= last; number++) {
        const entry *e = entry_of(g, source, to, number);
        if (!answered(e, number, &verdict) &&
            atomic_load_explicit(&e->tag, memory_order_relaxed) == tag)
            return number;
    }
    return 0;
}

/* Skip what was taken from the front. */
static uint64_t first_open(un_group *g, int source) {
    struct counters *c = &g->counters[source];
    enum verdict verdict;
    for (; c->taken < c->visible; c->taken++) {
        const entry *e = entry_of(g, source, g->rank, c->taken + 1);
        if (!answered(e, c->taken + 1, &verdict) || verdict != TAKEN) break;
    }
    return c->taken + 1;
}

static progress_made take_from_ring(un_group *g, un_message *m) {
    entry *e = entry_of(g, m->source, g->rank, m->number);
    const char *ring = channel_of(g, m->source, g->rank)->ring;
    progress_made made = STUCK;
    while (m->moved < m->stream.bytes) {
        uint64_t there = atomic_load_explicit(&e->moved_in, memory_order_acquire);
        size_t piece = there - m->moved;
        if (!piece) return made;
        if (piece > PIECE_BYTES) piece = PIECE_BYTES; /* pieces never run over the ring's end */
        stream_write(&m->stream, m->moved, ring + m->moved % RING_BYTES, piece, false);
        m->moved += piece;
        publish_to_peer(&e->moved_out, m->moved);
        ring_bell(g, m->source);
        made = MOVED;
    }
    g->counters[m->source].receiving = false;
    answer(e, m->number, TAKEN);
    ring_bell(g, m->source);
    return over(m, UN_OK);
}

static progress_made match(un_group *g, un_message *m, int source) {
    uint64_t number = find_message(g, source, g->rank, m->tag, first_open(g, source),
                                   g->counters[source].visible);
    if (!number) return STUCK;
    entry *e = entry_of(g, source, g->rank, number);
    bool small = e->bytes <= sizeof e->payload;
    if (!small && g->counters[source].receiving) return STUCK; /* one at a time through the ring */
    m->source = source;
    m->number = number;
    m->seen_bytes = e->bytes;
    m->seen_dtype = e->dtype;
    record_start(g, m->record);
    progress_made made = MOVED;
    if (e->bytes != m->stream.bytes || e->dtype != m->dtype) {
        answer(e, number, UNFIT);
        abort_group(g, UN_UNFIT, source, 0);
        made = over(m, UN_UNFIT);
    } else if (small) {
        stream_write(&m->stream, 0, e->payload, e->bytes, false);
        answer(e, number, TAKEN);
        made = over(m, UN_OK);
    } else {
        g->counters[source].receiving = true;
        set_phase(m, MOVING);
        answer(e, number, GRANTED);
    }
    ring_bell(g, source);
    return made;
}

static progress_made receive_step(un_group *g, un_message *m) {
    if (phase_of(m) == MOVING) return take_from_ring(g, m);
    if (m->peer >= 0) return match(g, m, m->peer);
    for (int step = 1; step <= g->ranks; step++) {
        progress_made made = match(g, m, (g->rank + step) % g->ranks);
        if (made != STUCK) return made;
    }
    return STUCK;
}

/* -- progress ---------------------------------------------------------------------------------- */

bool progress(un_group *g) {
    /* One look for the whole round: a message that comes in the middle of it must not go to a
     * receiver that stands behind another one. */
    for (int rank = 0; rank < g->ranks; rank++) {
        g->counters[rank].visible =
            atomic_load_explicit(&announced_by(g, rank)[g->rank], memory_order_acquire);
        g->counters[rank].full = false;
    }
    bool moved = false;
    un_status failed = status_from_abort(g);
    for (un_message **link = &g->messages; *link;) {
        un_message *m = *link;
        progress_made made = failed    ? over(m, failed)
                             : m->sends ? send_step(g, m)
                                        : receive_step(g, m);
        moved |= made != STUCK;
        if (made != OVER) {
            link = &m->next;
            continue;
        }
        *link = m->next;
        record_end(g, m->record, m->status);
        if (m->is_copy) {
            free(m);
            continue;
        }
        atomic_store_explicit(&m->done, 1, memory_order_release); /* its owner may free it now */
    }
    return moved;
}

/* -- what others ask --------------------------------------------------------------------------- */

/* Looking at this word is faster than a round of progress. It is only a hint, for other threads
 * move the message on too. */
const flag_t *awaited_word(const un_group *g, const un_message *m) {
    enum phase phase = phase_of(m);
    if (phase == MOVING && m->sends)
        return &entry_of(g, g->rank, m->peer, m->number)->moved_out;
    if (phase == MOVING) return &entry_of(g, m->source, g->rank, m->number)->moved_in;
    if (phase == ANNOUNCED) return &entry_of(g, g->rank, m->peer, m->number)->answer;
    if (!m->sends && m->peer >= 0) return &announced_by(g, m->peer)[g->rank];
    return NULL;
}

/* For deadlock.c: whether a message was answered, and whether one with this tag waits. */
bool message_answered(const un_group *g, int from, int to, uint64_t number) {
    enum verdict verdict;
    return answered(entry_of(g, from, to, number), number, &verdict);
}

bool message_waits(const un_group *g, int from, int to, int64_t tag) {
    uint64_t last = atomic_load_explicit(&announced_by(g, from)[to], memory_order_acquire);
    return last && find_message(g, from, to, tag, last > ENTRIES ? last - ENTRIES + 1 : 1, last);
}
