/* Point to point: starting messages and waiting for them.
 *
 * A thread that waits for a message, or the group's progress thread, takes the lock of all the
 * rank's messages and advances each as far as it can; then it sleeps on the rank's doorbell, which
 * peers ring when they have changed something.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>

#include "local/messages.h"
#include "base/records.h"
#include "base/stream.h"

enum { ROUNDS = 4 }; /* of spinning, before we tell the caller that we wait */

static void begin(un_group *g, un_message *m) {
    m->source = m->peer;
    m->record = open_record(g, signature_of(m->sends ? UN_SEND : UN_RECV, 0, m->peer, m->dtype),
                            m->stream.bytes, (uint64_t)m->tag, m->site, ARRIVED);
    atomic_store(&m->done, 0);
    pthread_mutex_lock(&g->messages.lock);
    m->previous = g->messages.newest;
    m->next = NULL;
    *(g->messages.newest ? &g->messages.newest->next : &g->messages.oldest) = m;
    g->messages.newest = m;
    m->moved = 0;
    m->is_expected = false;
    if (!status_from_abort(g)) (m->sends ? start_sending : start_receiving)(g, m);
    progress(g);
    pthread_mutex_unlock(&g->messages.lock);
}

/* In a forked child: a message that nothing will ever move. */
static un_status refuse_inherited(un_message *m) {
    m->status = UN_FORKED;
    atomic_store(&m->done, 1);
    return UN_FORKED;
}

/* An eager send that does not fit into an entry: a copy of it is sent instead. */
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
    copy->message.shape = NULL; /* its caller's */
    begin(g, &copy->message);
    if (start_progress_thread(g)) wake_progress_thread(g);
    m->status = status_from_abort(g);
    m->source = m->peer;
    atomic_store_explicit(&m->done, 1, memory_order_release);
    return true;
}

un_status un_message_start(un_group *g, un_message *m) {
    if (group_is_inherited(g)) return refuse_inherited(m);
    m->is_started = true;
    if (send_copy(g, m)) return UN_OK;
    begin(g, m);
    if (un_message_done(m)) return UN_OK;
    if (start_progress_thread(g)) wake_progress_thread(g);
    return UN_OK; /* without a progress thread messages advance whenever a thread waits */
}

/* Start and wait, in the caller's thread: no progress thread is needed. */
un_status un_message_run(un_group *g, un_message *m, const un_call *hooks) {
    if (group_is_inherited(g)) return refuse_inherited(m);
    if (send_copy(g, m)) return m->status;
    begin(g, m);
    return un_message_wait(g, m, hooks);
}

bool un_message_done(const un_message *m) {
    return atomic_load_explicit(&m->done, memory_order_acquire);
}

/* Whether a rank has closed the group and all that it sent us, if from another host, has
 * arrived. */
static bool has_left(const un_group *g, int rank) {
    if (!atomic_load(&control_of(g, rank)->closed)) return false;
    return !is_elsewhere(g, rank) || g->reach->had[rank] >= traffic_of(g, rank)[g->rank];
}

/* Whether the peer that we wait for has left, so that waiting is pointless. */
static bool peer_is_gone(un_group *g, const un_message *m) {
    bool gone = m->peer != g->rank && g->ranks > 1;
    pthread_mutex_lock(&g->messages.lock);
    for (int rank = 0; gone && rank < g->ranks; rank++)
        if (rank != g->rank && (m->peer < 0 || rank == m->peer)) gone = has_left(g, rank);
    pthread_mutex_unlock(&g->messages.lock);
    return gone;
}

/* A peer that has left may have replied just before. */
static bool last_look(un_group *g, const un_message *m) {
    look_for_progress(g);
    return un_message_done(m);
}

/* Make progress; then what the message waits for. */
static bool look(un_group *g, const un_message *m, awaited *next) {
    pthread_mutex_lock(&g->messages.lock);
    bool moved = progress(g);
    *next = un_message_done(m) ? (awaited){0} : awaited_word(g, m);
    pthread_mutex_unlock(&g->messages.lock);
    return moved;
}

static void glance(const awaited *next) {
    if (!next->word) {
        relax_cpu();
        return;
    }
    for (int spins = 0; spins < GLANCES && read_word(next->word) < next->target; spins++)
        relax_cpu();
}

static void look_for_deadlock(un_group *g, const un_message *m) {
    pthread_mutex_lock(&g->messages.lock);
    if (!un_message_done(m)) find_deadlock(g, m);
    pthread_mutex_unlock(&g->messages.lock);
}

/* How long to poll for messages before we sleep. */
static int64_t begin_looking(un_group *g, const un_message *m) {
    pthread_mutex_lock(&g->messages.lock);
    int64_t ns = begin_spin(g, &g->messages.spin, m->source);
    pthread_mutex_unlock(&g->messages.lock);
    return ns;
}

static void end_looking(un_group *g, bool paid_off) {
    pthread_mutex_lock(&g->messages.lock);
    end_spin(g, &g->messages.spin, paid_off);
    pthread_mutex_unlock(&g->messages.lock);
}

/* The caller is interrupted. Only the progress thread can continue its message; a blocking
 * message ends with the call, and the group with it. */
static void leave(un_group *g, const un_message *m) {
    if (!m->is_started) interrupt(g, 0);
    pthread_mutex_lock(&g->messages.lock);
    if (g->waiting.message == m) forget_waiting(g);
    progress(g);
    pthread_mutex_unlock(&g->messages.lock);
}

static un_status wait_with_progress(un_group *g, un_message *m, const un_call *hooks, patience *p,
                                    int64_t *start) {
    int64_t quiet_since = 0, looks_until = 0; /* 0: something has moved; we have looked enough */
    awaited next;
    for (int rounds = 0; !un_message_done(m); rounds++) {
        if (look(g, m, &next) || un_message_done(m)) {
            if (looks_until) end_looking(g, clock_ns() < looks_until);
            rounds = -1;
            quiet_since = looks_until = 0;
            continue;
        }
        if (!g->crowded && rounds < ROUNDS) {
            glance(&next);
            continue;
        }
        prepare_to_block(p);
        int64_t now = clock_ns();
        if (!*start) *start = now;
        if (!quiet_since) {
            quiet_since = now;
            looks_until = now + begin_looking(g, m);
        }
        if (now < looks_until) {
            if (g->crowded)
                sched_yield();
            else
                glance(&next);
            continue;
        }
        if (looks_until > quiet_since) end_looking(g, false);
        looks_until = 0;
        bool to_the_end = hooks->timeout_ns < 0;
        if (now - *start > SLICE_NS) {
            if (to_the_end) look_for_deadlock(g, m); /* others proceed by themselves */
            if (peer_is_gone(g, m) && !last_look(g, m)) abort_group(g, UN_PEER_CLOSED, m->peer, 0);
        }
        int64_t left_ns = *start + (to_the_end ? m->timeout_ns : hooks->timeout_ns) - now;
        if (left_ns <= 0) {
            if (!to_the_end) return UN_NOT_YET;
            abort_group(g, UN_TIMEOUT, g->rank, 0); /* ends all messages: their buffers are free */
            look_for_progress(g);
            continue;
        }
        if (to_the_end && left_ns < ASK_NS && !p->asked && m->peer >= 0) {
            p->asked = true;
            ask_where(g, m->peer, UN_ABOUT_MESSAGES);
        }
        note_core(g);
        sleep_at_doorbell(g, left_ns < SLICE_NS ? left_ns : SLICE_NS);
        if (!un_message_done(m) && hooks->pause && hooks->pause(hooks->argument)) {
            leave(g, m);
            return UN_INTERRUPTED;
        }
    }
    return m->status;
}

un_status un_message_wait(un_group *g, un_message *m, const un_call *hooks) {
    if (group_is_inherited(g)) return un_message_done(m) ? m->status : UN_FORKED;
    patience p = {.call = hooks};
    int64_t start = 0;
    atomic_fetch_add(&g->messages.waiters, 1);
    atomic_fetch_add_explicit(&g->messages.waits, 1, memory_order_relaxed);
    if (g->reach) g->reach->attend(true);
    un_status status = wait_with_progress(g, m, hooks, &p, &start);
    if (g->reach) g->reach->attend(false);
    atomic_fetch_sub(&g->messages.waiters, 1);
    if (status && un_message_done(m) && m->site)
        un_group_write_note(g, UN_SITE, UN_ABOUT_MESSAGES, m->site->text);
    return status;
}
