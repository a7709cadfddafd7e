/* Records of every call and message, and notes that ranks leave for each other.
 *
 * Each rank writes the ring in its own control block, without locks; other processes read it while
 * the program runs. A record's number is cleared before the record is overwritten and set
 * afterwards: a reader that sees the same number before and after a copy has a consistent record. A
 * work that ends a thousand records after it began finds its slot reused and leaves it alone.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <unistd.h>

#include "base/records.h"
#include "base/segment.h"
#include "base/wait.h"

/* The processor's own counter: reading it takes a few nanoseconds. Readers convert it to time by
 * two moments known by both clocks: when the group was opened, and now. */
static uint64_t ticks(void) {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    uint64_t count;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(count));
    return count;
#endif
}

/* What must be equal on all ranks, in 64 bits: operation, reduction and its form, refusal, root, type. */
uint64_t signature_of(un_operation operation, unsigned reduction, int root, un_dtype dtype) {
    return (uint64_t)operation | (uint64_t)reduction << 8 | (uint64_t)(uint16_t)root << 24 |
           (uint64_t)(dtype & 0xffffff) << 40;
}

static _Thread_local uint32_t step;

void un_count_step(void) { step++; }

/* A number for each calling thread, in the upper 8 bits; the main thread's is 1. */
static uint32_t thread_mark(void) {
    static _Atomic uint32_t others;
    static _Thread_local uint32_t mark;
    if (!mark) {
        bool is_main = gettid() == getpid();
        uint32_t other = 2 + atomic_fetch_add_explicit(&others, 1, memory_order_relaxed) % 254;
        mark = (is_main ? 1 : other) << THREAD_SHIFT;
    }
    return mark;
}

static void change_state(record *r, uint32_t state) {
    uint32_t thread = atomic_load_explicit(&r->state, memory_order_relaxed) & ~0u << THREAD_SHIFT;
    atomic_store_explicit(&r->state, thread | state, memory_order_relaxed);
}

/* The bits of the site's number for a record, once its text is in our control block. */
static uint32_t note_site(un_group *g, const un_site *site) {
    if (!site) return 0;
    site_text *t = &control_of(g, g->rank)->sites[site->number % SITES];
    uint64_t there = read_word(&t->number);
    if (there != site->number && atomic_compare_exchange_strong(&t->number, &there, 0)) {
        memcpy(t->text, site->text, sizeof t->text - 1);
        atomic_store_explicit(&t->number, site->number, memory_order_release);
    }
    return site->number % (1u << SITE_BITS);
}

static record *record_at(un_group *g, uint64_t number) {
    return &control_of(g, g->rank)->records[number % RECORDS];
}

uint64_t open_record(un_group *g, uint64_t signature, uint64_t bytes, uint64_t call,
                     const un_site *site, enum record_state state) {
    uint64_t number = atomic_fetch_add_explicit(&g->recorded, 1, memory_order_relaxed) + 1;
    record *r = record_at(g, number);
    write_word(&r->number, 0);
    atomic_thread_fence(memory_order_release); /* nothing below before the line above */
    write_word(&r->call, call);
    write_word(&r->signature, signature);
    write_word(&r->bytes, bytes);
    write_word(&r->started, 0);
    write_word(&r->ended, 0);
    write_word(&r->arrived, ticks());
    uint32_t where = note_site(g, site) | step << SITE_BITS;
    atomic_store_explicit(&r->site, where, memory_order_relaxed);
    atomic_store_explicit(&r->state, thread_mark() | state, memory_order_relaxed);
    atomic_store_explicit(&r->number, number, memory_order_release);
    return number;
}

static bool is_there(const record *r, uint64_t number) {
    return number && atomic_load_explicit(&r->number, memory_order_relaxed) == number;
}

void record_call(un_group *g, uint64_t number, uint64_t call) {
    record *r = record_at(g, number);
    if (!is_there(r, number)) return;
    write_word(&r->call, call);
    change_state(r, ARRIVED);
}

void record_start(un_group *g, uint64_t number) {
    record *r = record_at(g, number);
    if (!is_there(r, number)) return;
    write_word(&r->started, ticks());
    change_state(r, MOVING_DATA);
}

void record_end(un_group *g, uint64_t number, un_status status) {
    record *r = record_at(g, number);
    if (!is_there(r, number)) return;
    write_word(&r->ended, ticks());
    bool failed = status && status != UN_NOT_YET;
    change_state(r, (failed ? FAILED : FINISHED) | (uint32_t)status << 16);
}

/* -- calls of other libraries ------------------------------------------------------------------ */

uint64_t un_record_open(un_group *g, const un_call *call, uint64_t bytes, uint64_t number) {
    if (group_is_inherited(g)) return 0;
    uint64_t signature = signature_of(call->operation, call->reduction, call->root, call->dtype);
    return open_record(g, signature, bytes, number, call->site, ARRIVED);
}

void un_record_cover(un_group *g, bool covered) { g->is_covered = covered; }

void un_record_end(un_group *g, uint64_t number, un_status status) {
    if (number && !group_is_inherited(g)) record_end(g, number, status);
}

/* -- notes ------------------------------------------------------------------------------------- */

void write_note(note *n, uint64_t about, const char *text, size_t bytes) {
    atomic_store(&n->about, 0);
    atomic_thread_fence(memory_order_release); /* as above */
    memcpy(n->text, text, bytes);
    n->text[bytes] = 0;
    atomic_store(&n->about, about);
}

void un_group_write_note(un_group *g, un_note kind, uint64_t about, const char *text) {
    if (group_is_inherited(g)) return;
    note *n = &control_of(g, g->rank)->notes[kind];
    pthread_mutex_lock(&g->note_lock);
    uint64_t now = atomic_load(&n->about);
    /* A failed message has ended the group: its note matters more than those of later calls. */
    bool stays = now == UN_ABOUT_MESSAGES && (kind == UN_SITE || kind == UN_SHAPE);
    bool writes = now != about && !stays;
    if (writes) write_note(n, about, text, strnlen(text, UN_TEXT_BYTES - 1));
    pthread_mutex_unlock(&g->note_lock);
    if (writes && g->reach) g->reach->write_note(g, kind, about, text);
}

/* Leave a note with a shape, if it is known, after a short prefix. */
void write_shape_note(un_group *g, const char *before, const un_shape *shape, uint64_t number) {
    char text[UN_TEXT_BYTES];
    size_t length = (size_t)snprintf(text, sizeof text, "%s", before);
    int dims = shape ? shape->dims : -1;
    for (int d = 0; d < dims && d < UN_SHAPE_DIMS; d++)
        length += (size_t)snprintf(text + length, sizeof text - length, "%s%lld", d ? ", " : "(",
                                   (long long)shape->length[d]);
    const char *rest = dims > UN_SHAPE_DIMS ? ", ...)" : dims == 1 ? ",)" : dims ? ")" : "()";
    if (dims >= 0) snprintf(text + length, sizeof text - length, "%s", rest);
    un_group_write_note(g, UN_SHAPE, number, text);
}

bool un_group_read_note(const un_group *g, int rank, un_note kind, uint64_t about,
                        char text[UN_TEXT_BYTES]) {
    if (group_is_inherited(g)) return false;
    const note *n = &control_of(g, rank)->notes[kind];
    uint64_t seen = atomic_load(&n->about);
    if (!seen || (about && seen != about)) return false;
    memcpy(text, n->text, UN_TEXT_BYTES);
    text[UN_TEXT_BYTES - 1] = 0;
    atomic_thread_fence(memory_order_acquire); /* the text was read before we look again */
    return atomic_load(&n->about) == seen;
}

void ask_where(un_group *g, int rank, uint64_t call) {
    if (is_elsewhere(g, rank))
        g->reach->ask(g, rank, call);
    else
        atomic_store(&control_of(g, rank)->asked, call);
}

bool is_asked(const un_group *g) {
    const control *mine = control_of(g, g->rank);
    uint64_t asked = atomic_load(&mine->asked);
    return asked && asked != atomic_load(&mine->notes[UN_ANSWER].about);
}

void answer_where(un_group *g, const char *text) {
    un_group_write_note(g, UN_ANSWER, atomic_load(&control_of(g, g->rank)->asked), text);
}

/* -- for readers from outside ------------------------------------------------------------------ */

/* One moment by both clocks; read again if something came between the two readings. */
un_moment un_now(void) {
    un_moment now;
    uint64_t before, shortest = UINT64_MAX;
    for (int tries = 0; tries < 5; tries++) {
        before = ticks();
        uint64_t ns = (uint64_t)clock_ns(), gap = ticks() - before;
        if (gap >= shortest) continue;
        now = (un_moment){.ticks = before + gap / 2, .ns = ns};
        shortest = gap;
    }
    return now;
}

void un_group_introduce(un_group *g, const char *name, int global_rank) {
    if (group_is_inherited(g)) return;
    identity *me = &control_of(g, g->rank)->identity;
    me->opened = un_now();
    me->global_rank = global_rank;
    strncpy(me->group_name, name, sizeof me->group_name - 1);
    me->pid = (int32_t)getpid();
}

un_layout_of_records un_records_layout(int ranks) {
    return (un_layout_of_records){.first_control = PAGE_BYTES,
                                  .control_bytes = control_bytes_for(ranks),
                                  .identity = offsetof(control, identity),
                                  .records = offsetof(control, records),
                                  .record_bytes = sizeof(record),
                                  .record_count = RECORDS,
                                  .sites = offsetof(control, sites),
                                  .site_bytes = sizeof(site_text),
                                  .site_count = SITES,
                                  .asked = offsetof(control, asked),
                                  .answer = offsetof(control, notes[UN_ANSWER]),
                                  .reason = offsetof(control, notes[UN_REASON]),
                                  .progress = offsetof(control, progress),
                                  .closed = offsetof(control, closed)};
}
