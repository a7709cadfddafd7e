/* Deadlock: ranks that wait for each other in a circle.
 *
 * A rank that has waited for a message for a while notes down what it waits for. Whoever waits
 * then follows the notes from itself on. If they lead back, nobody in the circle can go on: a
 * note counts only while what it asks for is not there, and the same circle must be seen twice. A
 * rank that could go on with other messages meanwhile notes nothing.
 */
#include "internal.h"

void note_waiting(un_group *g, const un_message *m) {
    control *mine = control_of(g, g->rank);
    if (!m) {
        if (atomic_load_explicit(&mine->waiting, memory_order_relaxed))
            atomic_store(&mine->waiting, 0);
        g->noted = NULL;
        return;
    }
    if (g->noted == m) return;
    atomic_store(&mine->waiting, 0);
    atomic_store(&mine->waiting_for, m->sends ? m->number : (uint64_t)m->tag);
    atomic_store(&mine->waiting, (uint64_t)++g->notes << 32 | (uint64_t)m->sends << 31 |
                                     (uint64_t)(m->peer + 1));
    g->noted = m;
}

un_waiting un_group_waiting(const un_group *g, int rank) {
    const control *c = control_of(g, rank);
    uint64_t word = atomic_load(&c->waiting);
    return (un_waiting){.waits = word != 0,
                        .sends = word >> 31 & 1,
                        .peer = (int)(word & 0x7fffffff) - 1,
                        .what = (int64_t)atomic_load(&c->waiting_for)};
}

static bool still_blocked(const un_group *g, int rank, const un_waiting *w) {
    if (w->sends) return !message_answered(g, rank, w->peer, (uint64_t)w->what);
    return !message_waits(g, w->peer, rank, w->what);
}

/* Whether messages beside `m` are to come in, or to be announced, while we wait for it. Whoever
 * waits for one of those is not stuck, though we may not have got round to it yet. */
static bool expects_more(const un_group *g, const un_message *m) {
    bool more = false;
    for (const un_message *other = g->messages; other && !more; other = other->next)
        more = other != m && (!other->sends || !other->number);
    return more;
}

void find_deadlock(un_group *g, const un_message *m) {
    /* Where several threads wait, one of them may yet help another. */
    bool alone = m->peer >= 0 && (!m->sends || m->number) && !m->moved && g->waiters == 1 &&
                 !expects_more(g, m);
    note_waiting(g, alone ? m : NULL);
    uint64_t circle = 0;
    int rank = g->rank;
    for (int steps = 0; alone && steps < g->ranks; steps++) {
        uint64_t word = atomic_load(&control_of(g, rank)->waiting);
        un_waiting w = un_group_waiting(g, rank);
        if (!word || !w.waits || !still_blocked(g, rank, &w) ||
            atomic_load(&control_of(g, rank)->waiting) != word)
            break;
        circle = circle * 31 + word;
        rank = w.peer;
        if (rank != g->rank) continue;
        if (g->circle == circle) abort_group(g, UN_DEADLOCK, g->rank, 0);
        g->circle = circle;
        return;
    }
    g->circle = 0;
}
