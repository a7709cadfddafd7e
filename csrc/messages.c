/* Point to point: a channel for each ordered pair of ranks, matched first-in first-out by tag.
 *
 * A sender announces a message in one of its channel's entries; a small one is already there with
 * it. The receiver takes the oldest announced message with its tag: a small one by
 * copying it, a large one by granting it, upon which the sender passes it on through the
 * channel's ring in pieces. A send is over once its message is matched and out of its hands.
 *
 * All messages of a rank under way stand in one list. Whoever waits for one of them, or the
 * group's courier, a thread of its own, takes the list's lock and lets each make what progress it
 * can; then it sleeps on the rank's doorbell, which peers ring when they have changed something.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

enum {
    PIECE_BYTES = RING_BYTES / 4,
    SLICE_NS = 50 * 1000 * 1000,
    SPIN_NS = 50 * 1000,
    GLANCES = 64,
    ASK_NS = 800 * 1000 * 1000, /* before the deadline, time for an answer */
    COURIER_NS = 50 * 1000, /* how often the courier looks whether it is needed */
};

static const int64_t CLOSING_NS = 10 * (int64_t)1000000000; /* for eager sends at the end */

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
static void ring_bell(un_group *g, int rank) {
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

static bool fits_entry(const un_message *m) {
    return m->stream.bytes <= sizeof((entry *)0)->payload;
}

static bool is_eager(const un_group *g, const un_message *m) {
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

/* Let every message under way go as far as it can; whether anything moved. With the lock. */
static bool progress(un_group *g) {
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

static bool look_for_progress(un_group *g) {
    pthread_mutex_lock(&g->message_lock);
    bool moved = progress(g);
    pthread_mutex_unlock(&g->message_lock);
    return moved;
}

/* Sleep until a peer rings; not if something has moved since we last looked. */
static void listen_at_door(un_group *g, int64_t ns) {
    control *mine = control_of(g, g->rank);
    struct timespec slice = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    atomic_fetch_add_explicit(&mine->listeners, 1, memory_order_seq_cst);
    uint32_t seen = atomic_load_explicit(&mine->doorbell, memory_order_seq_cst);
    if (!look_for_progress(g))
        syscall(SYS_futex, &mine->doorbell, FUTEX_WAIT, seen, &slice, NULL, 0);
    atomic_fetch_sub_explicit(&mine->listeners, 1, memory_order_relaxed);
}

static void sleep_ns(int64_t ns) {
    struct timespec moment = {.tv_nsec = ns};
    nanosleep(&moment, NULL);
}

/* Wait to be needed. A message that somebody waits for goes on without us, and faster. */
static void park(un_group *g) {
    atomic_store(&g->courier_parked, 1);
    pthread_mutex_lock(&g->message_lock);
    bool needed = g->messages != NULL;
    pthread_mutex_unlock(&g->message_lock);
    struct timespec slice = {.tv_sec = 1};
    if (!needed && !atomic_load(&g->courier_stops))
        syscall(SYS_futex, &g->courier_parked, FUTEX_WAIT_PRIVATE, 1, &slice, NULL, 0);
    atomic_store(&g->courier_parked, 0);
}

/* The courier: keeps messages going that nobody waits for. */
static void *carry(void *argument) {
    un_group *g = argument;
    while (!atomic_load(&g->courier_stops)) {
        sleep_ns(COURIER_NS);
        pthread_mutex_lock(&g->message_lock);
        bool idle = !g->messages;
        bool moved = !idle && !g->waiters && progress(g);
        pthread_mutex_unlock(&g->message_lock);
        if (idle)
            park(g);
        else if (!moved && !g->waiters)
            listen_at_door(g, SLICE_NS);
    }
    return NULL;
}

static void call_courier(un_group *g) {
    if (atomic_exchange(&g->courier_parked, 0))
        syscall(SYS_futex, &g->courier_parked, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static bool start_courier(un_group *g) {
    if (atomic_load_explicit(&g->has_courier, memory_order_acquire)) return true;
    pthread_mutex_lock(&g->message_lock);
    if (!g->has_courier) g->has_courier = start_thread(&g->courier, carry, g);
    pthread_mutex_unlock(&g->message_lock);
    return g->has_courier;
}

/* Eager sends are over for their senders: give them some time to arrive. */
static void deliver_copies(un_group *g) {
    for (int64_t end = clock_ns() + CLOSING_NS; clock_ns() < end; sleep_ns(COURIER_NS)) {
        pthread_mutex_lock(&g->message_lock);
        progress(g);
        bool only_copies = g->messages != NULL;
        for (const un_message *m = g->messages; m; m = m->next) only_copies &= m->is_copy;
        pthread_mutex_unlock(&g->message_lock);
        if (!only_copies) return;
    }
}

/* The group closes: what is under way ends, and the courier with it. */
void stop_courier(un_group *g) {
    deliver_copies(g);
    pthread_mutex_lock(&g->message_lock);
    if (g->messages) {
        abort_group(g, UN_ABORTED, g->rank, g->calls);
        progress(g);
    }
    pthread_mutex_unlock(&g->message_lock);
    if (!g->has_courier) return;
    atomic_store(&g->courier_stops, 1);
    call_courier(g);
    ring_bell(g, g->rank);
    pthread_join(g->courier, NULL);
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

/* -- the interface ---------------------------------------------------------------------------- */

static void begin(un_group *g, un_message *m) {
    set_phase(m, TO_ANNOUNCE);
    m->moved = 0;
    m->source = m->peer;
    m->next = NULL;
    m->record = open_record(g, signature_of(m->sends ? UN_SEND : UN_RECV, 0, m->peer, m->dtype),
                            m->stream.bytes, (uint64_t)m->tag, m->site, ARRIVED);
    atomic_store(&m->done, 0);
    pthread_mutex_lock(&g->message_lock);
    un_message **link = &g->messages;
    while (*link) link = &(*link)->next;
    *link = m;
    progress(g);
    pthread_mutex_unlock(&g->message_lock);
}

/* In a forked child: a message that nobody will ever carry. */
static un_status refuse_inherited(un_message *m) {
    over(m, UN_FORKED);
    atomic_store(&m->done, 1);
    return UN_FORKED;
}

/* An eager send that does not fit into an entry: a copy goes on without it. */
static bool send_copy(un_group *g, un_message *m) {
    if (!is_eager(g, m) || fits_entry(m)) return false;
    struct {
        un_message message;
        un_view view;
        char bytes[];
    } *copy = malloc(sizeof *copy + m->stream.bytes);
    if (!copy) return false;
    stream_read(copy->bytes, &m->stream, 0, m->stream.bytes);
    copy->view = (un_view){.data = copy->bytes, .bytes = m->stream.bytes};
    copy->message = *m;
    copy->message.stream.views = &copy->view;
    copy->message.stream.count = 1;
    copy->message.is_copy = true;
    begin(g, &copy->message);
    if (start_courier(g)) call_courier(g);
    m->status = status_from_abort(g);
    m->source = m->peer;
    atomic_store_explicit(&m->done, 1, memory_order_release);
    return true;
}

un_status un_message_start(un_group *g, un_message *m) {
    if (group_is_inherited(g)) return refuse_inherited(m);
    if (send_copy(g, m)) return UN_OK;
    begin(g, m);
    if (un_message_done(m)) return UN_OK;
    if (start_courier(g)) call_courier(g);
    return UN_OK; /* without a courier the message goes on whenever somebody waits */
}

/* Start and wait, in the caller's thread: no courier is needed. */
un_status un_message_run(un_group *g, un_message *m, const un_call *hooks) {
    if (group_is_inherited(g)) return refuse_inherited(m);
    if (send_copy(g, m)) return m->status;
    begin(g, m);
    return un_message_wait(g, m, hooks);
}

bool un_message_done(const un_message *m) {
    return atomic_load_explicit(&m->done, memory_order_acquire);
}

/* Whether the one we wait for has closed the group, so that waiting is pointless. */
static bool peer_is_gone(const un_group *g, const un_message *m) {
    for (int rank = 0; rank < g->ranks; rank++) {
        if (rank == g->rank || (m->peer >= 0 && rank != m->peer)) continue;
        if (!atomic_load(&control_of(g, rank)->closed)) return false;
    }
    return m->peer != g->rank && g->ranks > 1;
}

/* A peer that has left may have answered just before. */
static bool last_look(un_group *g, const un_message *m) {
    look_for_progress(g);
    return un_message_done(m);
}

/* The one word that a message waits for; looking at it is faster than a round of progress. NULL
 * where there is no such word. It is only a hint, for other threads move the message on too. */
static const flag_t *awaited_word(const un_group *g, const un_message *m) {
    enum phase phase = phase_of(m);
    if (m->sends && phase == ANNOUNCED)
        return &entry_of(g, g->rank, m->peer, m->number)->answer;
    if (!m->sends && phase == TO_MATCH && m->peer >= 0) return &announced_by(g, m->peer)[g->rank];
    return NULL;
}

static void await_change(const flag_t *word, uint64_t before) {
    for (int spins = 0; spins < GLANCES && read_word(word) == before; spins++) relax_cpu();
}

static void look_for_circle(un_group *g, const un_message *m) {
    pthread_mutex_lock(&g->message_lock);
    find_deadlock(g, m);
    pthread_mutex_unlock(&g->message_lock);
}

static void forget_waiting(un_group *g) {
    pthread_mutex_lock(&g->message_lock);
    note_waiting(g, NULL);
    pthread_mutex_unlock(&g->message_lock);
}

static un_status wait_in_line(un_group *g, un_message *m, const un_call *hooks, patience *p,
                              int64_t *start) {
    for (int tries = 0; !un_message_done(m); tries++) {
        const flag_t *word = awaited_word(g, m);
        uint64_t before = word ? read_word(word) : 0;
        if (look_for_progress(g) || un_message_done(m)) continue;
        if (!g->crowded && tries < GLANCES) {
            if (word)
                await_change(word, before);
            else
                relax_cpu();
            continue;
        }
        prepare_to_block(p);
        int64_t now = clock_ns();
        if (!*start) *start = now;
        if (now - *start < SPIN_NS) {
            if (g->crowded) sched_yield();
            continue;
        }
        bool to_the_end = hooks->timeout_ns < 0;
        if (now - *start > SLICE_NS) {
            if (to_the_end) look_for_circle(g, m); /* others will go on by themselves */
            if (peer_is_gone(g, m) && !last_look(g, m)) abort_group(g, UN_PEER_CLOSED, m->peer, 0);
        }
        int64_t left_ns = *start + (to_the_end ? m->timeout_ns : hooks->timeout_ns) - now;
        if (left_ns <= 0) {
            if (!to_the_end) return UN_NOT_YET;
            un_message_give_up(g, UN_TIMEOUT);
            continue;
        }
        if (to_the_end && left_ns < ASK_NS && !p->asked && m->peer >= 0) {
            p->asked = true;
            ask_where(g, m->peer, UN_ABOUT_MESSAGES);
        }
        listen_at_door(g, left_ns < SLICE_NS ? left_ns : SLICE_NS);
        if (!un_message_done(m) && hooks->pause && hooks->pause(hooks->argument)) {
            un_message_give_up(g, UN_INTERRUPTED);
            return UN_INTERRUPTED;
        }
    }
    return m->status;
}

un_status un_message_wait(un_group *g, un_message *m, const un_call *hooks) {
    if (group_is_inherited(g)) return un_message_done(m) ? m->status : UN_FORKED;
    patience p = {.call = hooks};
    int64_t start = 0;
    atomic_fetch_add(&g->waiters, 1);
    un_status status = wait_in_line(g, m, hooks, &p, &start);
    atomic_fetch_sub(&g->waiters, 1);
    if (start && status != UN_DEADLOCK) forget_waiting(g); /* a report reads the notes */
    if (status && status != UN_NOT_YET && m->site)
        un_group_tell(g, UN_SITE, UN_ABOUT_MESSAGES, m->site->text);
    return status;
}

/* End the group, and with it every message under way: afterwards their memory is the owners'. */
void un_message_give_up(un_group *g, un_status why) {
    abort_group(g, why, g->rank, 0);
    look_for_progress(g);
}
