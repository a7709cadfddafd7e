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
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

enum {
    PIECE_BYTES = RING_BYTES / 4,
    SLICE_NS = 50 * 1000 * 1000,
    SPIN_NS = 50 * 1000,
    GLANCES = 64,
    COURIER_NS = 50 * 1000, /* how often the courier looks whether it is needed */
};

enum verdict { GRANTED = 1, TAKEN, UNFIT }; /* what a receiver writes beside a message's number */

enum phase { TO_ANNOUNCE, TO_MATCH = TO_ANNOUNCE, ANNOUNCED, MOVING };

static entry *entry_of(const un_group *g, int from, int to, uint64_t number) {
    return &channel_of(g, from, to)->entries[number % ENTRIES];
}

static bool answered(const entry *e, uint64_t number, enum verdict *verdict) {
    uint64_t answer = atomic_load_explicit(&e->answer, memory_order_acquire);
    *verdict = (enum verdict)(answer & 3);
    return answer >> 2 == number;
}

static void answer(entry *e, uint64_t number, enum verdict verdict) {
    atomic_store_explicit(&e->answer, number << 2 | verdict, memory_order_release);
}

static void ring_bell(un_group *g, int rank) {
    control *c = control_of(g, rank);
    atomic_fetch_add_explicit(&c->doorbell, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&c->listeners, memory_order_seq_cst)) wake_listeners(c);
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
        abort_group(g, UN_ABORTED, g->rank, g->calls); /* the receiver would wait in vain */
        return over(m, status);
    }
    e->tag = m->tag;
    e->bytes = m->stream.bytes;
    e->dtype = m->dtype;
    atomic_store_explicit(&e->moved_in, 0, memory_order_relaxed);
    atomic_store_explicit(&e->moved_out, 0, memory_order_relaxed);
    if (e->bytes <= sizeof e->payload) stream_read(e->payload, &m->stream, 0, e->bytes);
    g->counters[m->peer].sent = m->number = number;
    m->phase = ANNOUNCED;
    atomic_store_explicit(&announced_by(g, g->rank)[m->peer], number, memory_order_release);
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
        atomic_store_explicit(&e->moved_in, m->moved, memory_order_release);
        ring_bell(g, m->peer);
        made = MOVED;
    }
    return over(m, UN_OK);
}

static progress_made send_step(un_group *g, un_message *m) {
    if (m->phase == TO_ANNOUNCE) {
        progress_made made = announce(g, m);
        bool eager = (int64_t)m->stream.bytes <= g->eager_bytes &&
                     m->stream.bytes <= sizeof((entry *)0)->payload;
        return made == MOVED && eager ? over(m, UN_OK) : made;
    }
    if (m->phase == MOVING) return pass_on(g, m);
    enum verdict verdict;
    if (!answered(entry_of(g, g->rank, m->peer, m->number), m->number, &verdict)) return STUCK;
    if (verdict != GRANTED) return over(m, verdict == TAKEN ? UN_OK : UN_UNFIT);
    m->phase = MOVING;
    return pass_on(g, m);
}

/* -- receiving --------------------------------------------------------------------------------- */

/* The oldest message from `source` with this tag that nobody has taken; 0: none. */
static uint64_t find_message(const un_group *g, int source, int to, int64_t tag, uint64_t first,
                             uint64_t last) {
    enum verdict verdict;
    for (uint64_t number = first; number <= last; number++) {
        const entry *e = entry_of(g, source, to, number);
        if (!answered(e, number, &verdict) && e->tag == tag) return number;
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
        atomic_store_explicit(&e->moved_out, m->moved, memory_order_release);
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
        m->phase = MOVING;
        answer(e, number, GRANTED);
    }
    ring_bell(g, source);
    return made;
}

static progress_made receive_step(un_group *g, un_message *m) {
    if (m->phase == MOVING) return take_from_ring(g, m);
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
    un_status failed = (un_status)(atomic_load(&g->header->abort) & 0xff);
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
        atomic_store_explicit(&m->done, 1, memory_order_release); /* its owner may free it now */
    }
    return moved;
}

static void listen_at_door(un_group *g, uint32_t seen, int64_t ns) {
    control *mine = control_of(g, g->rank);
    struct timespec slice = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    atomic_fetch_add_explicit(&mine->listeners, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&mine->doorbell, memory_order_seq_cst) == seen)
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
        uint32_t seen = atomic_load(&control_of(g, g->rank)->doorbell);
        pthread_mutex_lock(&g->message_lock);
        bool idle = !g->messages;
        bool moved = !idle && !g->waiters && progress(g);
        pthread_mutex_unlock(&g->message_lock);
        if (idle)
            park(g);
        else if (!moved && !g->waiters)
            listen_at_door(g, seen, SLICE_NS);
    }
    return NULL;
}

static void call_courier(un_group *g) {
    if (atomic_exchange(&g->courier_parked, 0))
        syscall(SYS_futex, &g->courier_parked, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static bool start_courier(un_group *g) {
    if (!g->has_courier) g->has_courier = start_thread(&g->courier, carry, g);
    return g->has_courier;
}

/* The group closes: what is under way ends, and the courier with it. */
void stop_courier(un_group *g) {
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
    m->phase = TO_ANNOUNCE;
    m->moved = 0;
    m->source = m->peer;
    m->next = NULL;
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

un_status un_message_start(un_group *g, un_message *m) {
    if (group_is_inherited(g)) return refuse_inherited(m);
    begin(g, m);
    if (un_message_done(m)) return UN_OK;
    pthread_mutex_lock(&g->message_lock);
    bool started = start_courier(g);
    pthread_mutex_unlock(&g->message_lock);
    if (started) call_courier(g);
    return UN_OK; /* without a courier the message goes on whenever somebody waits */
}

/* Start and wait, in the caller's thread: no courier is needed. */
un_status un_message_run(un_group *g, un_message *m, const un_call *hooks) {
    if (group_is_inherited(g)) return refuse_inherited(m);
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
    pthread_mutex_lock(&g->message_lock);
    progress(g);
    pthread_mutex_unlock(&g->message_lock);
    return un_message_done(m);
}

static un_status wait_in_line(un_group *g, un_message *m, const un_call *hooks, patience *p,
                              int64_t *start) {
    control *mine = control_of(g, g->rank);
    for (int tries = 0; !un_message_done(m); tries++) {
        uint32_t seen = atomic_load_explicit(&mine->doorbell, memory_order_acquire);
        pthread_mutex_lock(&g->message_lock);
        bool moved = progress(g);
        pthread_mutex_unlock(&g->message_lock);
        if (moved || un_message_done(m)) continue;
        if (!g->crowded && tries < GLANCES) {
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
            if (to_the_end) find_deadlock(g, m); /* others will go on by themselves */
            if (peer_is_gone(g, m) && !last_look(g, m)) abort_group(g, UN_PEER_CLOSED, m->peer, 0);
        }
        int64_t left_ns = *start + (to_the_end ? m->timeout_ns : hooks->timeout_ns) - now;
        if (left_ns <= 0) {
            if (!to_the_end) return UN_NOT_YET;
            un_message_give_up(g, UN_TIMEOUT);
            continue;
        }
        listen_at_door(g, seen, left_ns < SLICE_NS ? left_ns : SLICE_NS);
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
    if (start && m->status != UN_DEADLOCK) note_waiting(g, NULL); /* a report reads the notes */
    return status;
}

/* End the group, and with it every message under way: afterwards their memory is the owners'. */
void un_message_give_up(un_group *g, un_status why) {
    abort_group(g, why, g->rank, 0);
    pthread_mutex_lock(&g->message_lock);
    progress(g);
    pthread_mutex_unlock(&g->message_lock);
}
