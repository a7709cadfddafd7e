/* Direct calls: peers read the senders' memory in place, without slots.
 *
 * A rank whose input lies in its part of a block posts where, and copies nothing. So does one with
 * a large input in its own memory, if one copy by the kernel is likely to cost less than two of
 * ours (reading.c). Once all have posted, every rank knows whether all large senders did so: then
 * receivers read that memory itself. If only some did, these copy their first pieces to slots late,
 * and the call continues as any other (call.c). It also does if the kernel refuses a read, which
 * each rank publishes and all wait to learn.
 *
 * Most calls only read their peers' memory. In all_reduce and reduce each rank combines its share
 * of all inputs into all outputs. So that no rank writes into memory whose owner has returned after
 * a failure, a rank publishes that it writes, checks the abort word before each piece, and leaves a
 * failed call only after its peers have stopped.
 */
#include "local/blocks.h"
#include "local/copiers.h"
#include "local/reading.h"
#include "base/stream.h"
#include "base/watcher.h"

/* How long peers may take to stop writing; a stopped one may write the rest of a piece later. */
enum { STOPPING_MS = 1000 };

static const place *places_of(const execution *x, int rank) {
    return (const place *)(const void *)descriptor_of(x->g, rank, x->number)->payload;
}

/* -- before the meeting -------------------------------------------------------------------------- */

/* What we send; of several parts, the largest. */
static size_t given_bytes(const execution *x) {
    un_operation o = x->call->operation;
    bool wide = o == UN_SCATTER || o == UN_ALL_TO_ALL;
    size_t most = 0;
    for (int part = 0; x->call->input && part < (wide ? x->g->ranks : 1); part++)
        if (x->call->input[part].bytes > most) most = x->call->input[part].bytes;
    return most;
}

static bool has_pairs(const execution *x) { return x->pairs_agree != NULL; }

/* Whether the kernel should read a rank's own memory. Not in calls of one step: they may be
 * posted long before their rank continues with them. */
static bool pays_to_read(const execution *x) {
    un_operation o = x->call->operation;
    size_t ranks = (size_t)x->g->ranks, bytes = has_pairs(x) ? given_bytes(x) : x->bytes / ranks;
    size_t least = x->g->crowded ? READ_CROWDED_FROM : READ_FROM;
    bool gathers = o == UN_ALL_GATHER && x->steps > 1 && ranks <= READING_RANKS && !x->g->crowded;
    return (gathers || o == UN_ALL_TO_ALL) && bytes >= least && bytes <= READ_MOST &&
           may_read_peers(x->g);
}

static bool place_stream(execution *x, const un_stream *s, place *where) {
    *where = (place){0};
    if (!s->bytes) return true;
    const char *data = stream_direct(s, 0, s->bytes);
    if (!data || find_place(x->g, data, s->bytes, where)) return data;
    *where = (place){NO_BLOCK, (uintptr_t)data};
    x->marks |= IN_PROCESS;
    return pays_to_read(x);
}

/* In place, a part that a peer reads is overwritten by what comes from that peer. */
static bool swaps(const un_call *call, int ranks) {
    for (int rank = 0; rank < ranks; rank++)
        if (call->input[rank].bytes &&
            call->input[rank].views->data == call->output[rank].views->data)
            return true;
    return false;
}

/* Whether the result of a reduction goes to `rank`. */
static bool is_written(const execution *x, int rank) {
    return x->call->operation != UN_REDUCE || rank == x->call->root;
}

/* Publish where our input lies; false: peers cannot read it there. */
static bool post_places(execution *x) {
    un_group *g = x->g;
    const un_call *call = x->call;
    place *places = (place *)(void *)descriptor_of(g, g->rank, x->number)->payload;
    size_t most = sizeof((descriptor *)0)->payload / sizeof *places;
    switch (call->operation) {
    case UN_ALL_REDUCE:
    case UN_REDUCE:
        return place_stream(x, call->input, &places[0]) &&
               (!is_written(x, g->rank) || place_stream(x, call->output, &places[1]));
    case UN_REDUCE_SCATTER:
    case UN_SCATTER:
    case UN_ALL_TO_ALL:
        if ((size_t)g->ranks > most) return false;
        if (call->operation == UN_ALL_TO_ALL && swaps(call, g->ranks)) return false;
        for (int rank = 0; rank < g->ranks; rank++)
            if (!place_stream(x, &call->input[rank], &places[rank])) return false;
        return true;
    default: return place_stream(x, call->input, &places[0]);
    }
}

void plan_direct(execution *x) {
    un_group *g = x->g;
    size_t least = g->direct_from;
    x->may_be_direct = g->ranks > 1 && x->call->operation != UN_BARRIER &&
                       (has_pairs(x) || x->bytes >= least);
    if (!x->may_be_direct || !x->needs_slice) return;
    bool in_block = atomic_load_explicit(&g->blocks.count, memory_order_relaxed) &&
                    (!has_pairs(x) || given_bytes(x) >= least);
    bool readable = (in_block || pays_to_read(x)) && post_places(x);
    x->marks = readable ? READABLE | x->marks : 0;
}

/* -- after it -------------------------------------------------------------------------------------- */

/* Whether `rank` sends more than fits into its descriptor. */
bool is_giver(const execution *x, int rank) {
    const un_call *call = x->call;
    if (x->g->calls.descriptor_pitch[rank]) return false;
    if (call->operation == UN_BROADCAST) return rank == call->root;
    if (call->operation == UN_ALL_GATHER) return call->output[rank].bytes != 0;
    return true;
}

/* A sender that fails may change what we have read, but sets this word first: see end_call. */
static un_status look_at_abort(un_group *g) {
    atomic_thread_fence(memory_order_acquire);
    bool over = atomic_load_explicit(&g->segment.header->abort, memory_order_seq_cst);
    return over ? fail_from_abort(g) : UN_OK;
}

/* Where place `index` of `source` lies in our mapping. */
static un_status find_given(execution *x, int source, size_t index, size_t bytes, char **found) {
    *found = address_of(x->g, source, places_of(x, source)[index], bytes);
    return *found ? UN_OK : fail(x->g, UN_DAMAGED, source);
}

typedef struct taking { /* what lies at `from`, of `source`'s own memory or of a block, into `to` */
    execution *x;
    const un_stream *to;
    int source;
    uintptr_t from;
} taking;

static un_status take_by_kernel(const void *what, size_t offset, size_t bytes) {
    const taking *t = what;
    const un_stream *to = t->to;
    execution *x = t->x;
    bool whole = stream_direct(to, offset, bytes);
    size_t step = whole ? READ_AT_ONCE : COPIED_BYTES, end = offset + bytes;
    char bounce[COPIED_BYTES];
    un_status status = UN_OK;
    for (size_t done = offset; !status && done < end; done += step) {
        size_t some = end - done < step ? end - done : step;
        char *target = whole ? stream_direct(to, done, some) : bounce;
        bool is_read = read_peer(x->g, t->source, target, t->from + done, some);
        if (is_read && !whole) stream_write(to, done, bounce, some, false);
        status = look_at_abort(x->g);
        if (!status && !is_read) status = UN_REFUSED;
    }
    return status || peer_lives(x->g, t->source) ? status : UN_REFUSED;
}

static un_status take_from_block(const void *what, size_t offset, size_t bytes) {
    const taking *t = what;
    un_status status = UN_OK;
    for (size_t done = offset, end = offset + bytes; !status && done < end;
         done += COPIED_AT_ONCE) {
        size_t some = end - done < COPIED_AT_ONCE ? end - done : COPIED_AT_ONCE;
        if (t->x->fills_new_memory) make_pages(t->to, done, some);
        stream_write(t->to, done, (char *)t->from + done, some, t->x->large);
        status = look_at_abort(t->x->g);
    }
    return status;
}

/* Part `part` of what `source` sends, all of it, into `to`. */
static un_status take_directly(execution *x, const un_stream *to, int source, size_t part) {
    if (!to->bytes) return UN_OK;
    size_t pitch = x->g->calls.descriptor_pitch[source];
    place where = places_of(x, source)[part];
    if (!pitch && where.block == NO_BLOCK)
        return run_shared(x, to->bytes, take_by_kernel, &(taking){x, to, source, where.offset});
    char *from = descriptor_of(x->g, source, x->number)->payload + part * pitch;
    un_status status = pitch ? UN_OK : find_given(x, source, part, to->bytes, &from);
    if (status) return status;
    return run_shared(x, to->bytes, take_from_block, &(taking){x, to, source, (uintptr_t)from});
}

/* One part from each of the others, from the rank after us on, so that not all read the same
 * one. */
static un_status take_from_all(execution *x, bool from_parts) {
    un_group *g = x->g;
    un_status status = UN_OK;
    for (int step = 1; !status && step < g->ranks; step++) {
        int source = (g->rank + step) % g->ranks;
        size_t part = from_parts ? (size_t)g->rank : 0;
        status = take_directly(x, &x->call->output[source], source, part);
    }
    return status;
}

/* Combine g->calls.sources from `offset` on. */
static void combine_some(const execution *x, char *result, size_t offset, size_t bytes) {
    un_group *g = x->g;
    const void *sources[UN_MAX_RANKS];
    for (int rank = 0; rank < g->ranks; rank++)
        sources[rank] = (const char *)g->calls.sources[rank] + offset;
    combine_sources(x, result, sources, bytes);
}

static un_status reduce_piece(const void *what, size_t offset, size_t bytes) {
    const execution *x = what;
    const un_stream *to = x->call->output;
    bool whole = stream_direct(to, offset, bytes);
    size_t step = whole ? COPIED_AT_ONCE : BOUNCE_BYTES, end = offset + bytes;
    _Alignas(64) char made[BOUNCE_BYTES];
    un_status status = UN_OK;
    for (size_t done = offset; !status && done < end; done += step) {
        size_t some = end - done < step ? end - done : step;
        if (x->fills_new_memory) make_pages(to, done, some);
        combine_some(x, whole ? stream_direct(to, done, some) : made, done, some);
        if (!whole) stream_write(to, done, made, some, false);
        status = look_at_abort(x->g);
    }
    return status;
}

static un_status reduce_and_take(execution *x) {
    un_group *g = x->g;
    size_t bytes = x->call->output->bytes;
    if (!bytes) return UN_OK;
    for (int rank = 0; rank < g->ranks; rank++) {
        char *part;
        un_status status = find_given(x, rank, (size_t)g->rank, bytes, &part);
        if (status) return status;
        g->calls.sources[rank] = part;
    }
    return run_shared(x, bytes, reduce_piece, x);
}

/* -- writing into all ranks' memory ------------------------------------------------------------ */

typedef struct share { /* ours, of every output; our own, or the root's, is combined first */
    const execution *x;
    int made_by;
    char **outputs;
} share;

/* Combine some of our share, piece by piece, and copy it from the cache to the other outputs. */
static un_status combine_piece(const void *what, size_t offset, size_t bytes) {
    const share *s = what;
    un_group *g = s->x->g;
    un_status status = look_at_abort(g);
    for (size_t done = offset, end = offset + bytes; !status && done < end; done += COPIED_BYTES) {
        size_t some = end - done < COPIED_BYTES ? end - done : COPIED_BYTES;
        char *result = s->outputs[s->made_by] + done;
        combine_some(s->x, result, done, some);
        for (int rank = 0; rank < g->ranks; rank++)
            if (is_written(s->x, rank) && rank != s->made_by)
                memcpy(s->outputs[rank] + done, result, some);
        status = look_at_abort(g);
    }
    return status;
}

static un_status combine_share(execution *x) {
    un_group *g = x->g;
    const un_call *call = x->call;
    span mine = share_of_rank(x, g->rank, call->input->bytes, LINE_BYTES);
    int made_by = call->operation == UN_REDUCE ? call->root : g->rank;
    char *outputs[UN_MAX_RANKS];
    for (int rank = 0; rank < g->ranks; rank++) {
        char *input, *output = NULL;
        un_status status = find_given(x, rank, 0, call->input->bytes, &input);
        if (!status && is_written(x, rank))
            status = find_given(x, rank, 1, call->input->bytes, &output);
        if (status) return status;
        g->calls.sources[rank] = input + mine.offset;
        outputs[rank] = output ? output + mine.offset : NULL;
    }
    return run_shared(x, mine.bytes, combine_piece, &(share){x, made_by, outputs});
}

/* The call has failed: make sure that no peer writes into our memory once we return. */
static void wait_for_writers(execution *x) {
    un_group *g = x->g;
    int64_t end = clock_ns() + STOPPING_MS * (int64_t)1000000, ignored;
    prepare_to_block(&x->patience);
    for (int rank = 0; rank < g->ranks; rank++)
        while (rank != g->rank && !peer_is_dead(g, rank, &ignored) && clock_ns() < end &&
               atomic_load(&control_of(g, rank)->writing) == x->number)
            sleep_ns(100 * 1000);
}

static un_status combine_everywhere(execution *x) {
    flag_t *writing = &control_of(x->g, x->g->rank)->writing;
    atomic_store(writing, x->number); /* before we check the abort word, as ranks that fail do */
    un_status status = combine_share(x);
    atomic_store(writing, 0);
    return status;
}

/* -- the whole ----------------------------------------------------------------------------------- */

static un_status move_directly(execution *x) {
    un_group *g = x->g;
    const un_call *call = x->call;
    int me = g->rank;
    un_status status = UN_OK;
    switch (call->operation) {
    case UN_BROADCAST:
        if (me != call->root) status = take_directly(x, call->output, call->root, 0);
        break;
    case UN_GATHER:
    case UN_ALL_GATHER:
        if (call->operation == UN_GATHER && me != call->root) break;
        status = take_from_all(x, false);
        if (!status) copy_own(x, &call->output[me], call->input, 0, call->input->bytes);
        break;
    case UN_SCATTER:
        if (me == call->root)
            copy_own(x, call->output, &call->input[me], 0, call->output->bytes);
        else
            status = take_directly(x, call->output, call->root, (size_t)me);
        break;
    case UN_ALL_TO_ALL:
        status = take_from_all(x, true);
        if (!status) copy_own(x, &call->output[me], &call->input[me], 0, call->input[me].bytes);
        break;
    case UN_REDUCE_SCATTER: status = reduce_and_take(x); break;
    default: status = combine_everywhere(x); break;
    }
    return status;
}

static bool is_read_by_kernel(const execution *x) {
    uint64_t signatures = 0;
    for (int rank = 0; rank < x->g->ranks; rank++)
        signatures |= read_word(&descriptor_of(x->g, rank, x->number)->signature);
    return signatures & IN_PROCESS;
}

/* Once all have finished: whether the kernel refused a read to any rank. */
static bool is_unread(const execution *x) {
    bool unread = false;
    for (int rank = 0; rank < x->g->ranks; rank++)
        unread |= read_word(&control_of(x->g, rank)->unread) == x->number;
    return unread;
}

un_status run_direct(execution *x) {
    un_group *g = x->g;
    bool by_kernel = is_read_by_kernel(x);
    begin_reading(g);
    un_status status = move_directly(x);
    end_reading(g);
    if (status == UN_REFUSED) {
        write_word(&control_of(g, g->rank)->unread, x->number);
        status = UN_OK;
    }
    if (!status) status = finish_step(x, by_kernel || is_giver(x, g->rank));
    g->calls.steps++;
    if (!status && by_kernel && is_unread(x)) return UN_REFUSED;
    bool writes = x->call->operation == UN_ALL_REDUCE || x->call->operation == UN_REDUCE;
    if (status && writes) wait_for_writers(x);
    return status;
}
