/* Deadlock: a cycle of ranks that wait for each other.
 *
 * A rank that has waited for a message for a while leaves a note of what it waits for. Waiting
 * ranks follow the notes, each from its own. If they lead back, no rank in the cycle can proceed: a
 * note counts only while its rank has read all that the peer wrote for it, it is removed before the
 * rank publishes that it has read its message, and the same cycle must be seen twice. A rank that
 * could proceed with other messages meanwhile is in no cycle. After a failure the notes stay, for
 * error texts.
 */
#include "local/messages.h"

enum { PEER_BITS = 16, SENDS = 1 << 16, STARTED = 1 << 17, ALONE = 1 << 18 };

void forget_waiting(un_group *g) {
    atomic_store(&control_of(g, g->rank)->waiting, 0);
    g->waiting.message = NULL;
    if (g->reach) g->reach->write_waiting(g);
}

/* Over hosts: publish how many messages and replies we have exchanged with each rank; returns
 * whether that has changed since we last did. */
static bool note_traffic(un_group *g) {
    bool changed = false;
    uint64_t *sent = traffic_of(g, g->rank), *had = sent + g->ranks;
    for (int rank = 0; g->reach && rank < g->ranks; rank++) {
        const struct traffic *t = &g->messages.traffic[rank];
        bool far = is_elsewhere(g, rank);
        uint64_t to = far ? g->reach->sent[rank] : t->announced + t->replied;
        uint64_t from = far ? g->reach->had[rank] : t->entries_read + t->heard;
        changed |= sent[rank] != to || had[rank] != from;
        sent[rank] = to;
        had[rank] = from;
    }
    return changed;
}

void note_waiting(un_group *g, const un_message *m, bool alone) {
    control *mine = control_of(g, g->rank);
    uint64_t word = (uint64_t)(m->peer + 1) | (m->sends ? SENDS : 0) |
                    (m->is_started ? STARTED : 0) | (alone ? ALONE : 0);
    const un_match *other = m->sends ? NULL : oldest_from(&g->messages.unmatched, m->peer);
    uint64_t others = m->peer < 0 ? g->messages.unmatched.count
                                  : g->messages.traffic[m->peer].unmatched;
    atomic_store(&mine->unmatched, other ? others : 0);
    atomic_store(&mine->unmatched_tag, other ? (uint64_t)other->tag : 0);
    bool changed = note_traffic(g);
    if (g->waiting.message == m && (uint32_t)atomic_load(&mine->waiting) == word && !changed)
        return;
    atomic_store(&mine->waiting, 0);
    atomic_store(&mine->waiting_tag, (uint64_t)m->tag);
    atomic_store(&mine->waiting, (uint64_t)++g->waiting.notes << 32 | word);
    g->waiting.message = m;
    if (g->reach) g->reach->write_waiting(g);
}

un_waiting read_waiting(const un_group *g, int rank, uint64_t word) {
    const control *c = control_of(g, rank);
    int peer = (int)(word & ((1 << PEER_BITS) - 1)) - 1;
    if (!word || peer >= g->ranks) return (un_waiting){0};
    return (un_waiting){.waits = true,
                        .sends = word & SENDS,
                        .is_started = word & STARTED,
                        .alone = word & ALONE,
                        .peer = peer,
                        .tag = (int64_t)atomic_load(&c->waiting_tag),
                        .unmatched = atomic_load(&c->unmatched),
                        .unmatched_tag = (int64_t)atomic_load(&c->unmatched_tag)};
}

/* A rank's message may be on its way as long as the rank has something to read. */
static bool still_blocked(const un_group *g, int rank, const un_waiting *w) {
    if (!w->waits || !w->alone || w->peer < 0) return false;
    if (is_elsewhere(g, rank) || is_elsewhere(g, w->peer))
        return traffic_of(g, w->peer)[rank] == traffic_of(g, rank)[g->ranks + w->peer];
    return w->sends ? !has_unread(g, rank, w->peer, true) : !has_unread(g, w->peer, rank, false);
}

/* Whether other messages than `m` are still to arrive, or to be announced, while we wait for it.
 * A peer that waits for one of those is not stuck, though we may not have handled it yet. */
static bool expects_more(const un_group *g, const un_message *m) {
    bool more = false;
    for (const un_message *other = g->messages.oldest; other && !more; other = other->next)
        more = other != m && (!other->sends || other->phase == TO_ANNOUNCE);
    return more;
}

void find_deadlock(un_group *g, const un_message *m) {
    /* Where several threads wait, one of them may yet help another. */
    bool alone = m->peer >= 0 && (m->phase == ANNOUNCED || m->phase == WANTED) &&
                 g->messages.waiters == 1 && !expects_more(g, m);
    note_waiting(g, m, alone);
    uint64_t cycle = 0;
    int rank = g->rank;
    for (int steps = 0; alone && steps < g->ranks; steps++) {
        uint64_t word = atomic_load(&control_of(g, rank)->waiting);
        un_waiting w = read_waiting(g, rank, word);
        if (!still_blocked(g, rank, &w) || atomic_load(&control_of(g, rank)->waiting) != word)
            break;
        cycle = cycle * 31 + word;
        rank = w.peer;
        if (rank != g->rank) continue;
        if (g->waiting.cycle == cycle) abort_group(g, UN_DEADLOCK, g->rank, 0);
        g->waiting.cycle = cycle;
        return;
    }
    g->waiting.cycle = 0;
}
