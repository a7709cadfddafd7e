/* The collectives: for each, what a rank copies in (bring), combines and copies out (take) in a
 * step.
 *
 * A slot holds one part, or one for each rank, `pitch` bytes apart. Contributions that fit lie in
 * the descriptor itself (they arrive with it, in the same cache lines) and need one step.
 */
#include "local/copiers.h"
#include "base/stream.h"

_Static_assert(STEP_BYTES <= SLOT_BYTES && CUT_STEP_BYTES <= SLOT_BYTES, "a step fits into a slot");
_Static_assert(DESCRIBED_MOST <= sizeof((descriptor *)0)->payload &&
                   DESCRIBED_OVER_HOSTS <= sizeof((descriptor *)0)->payload,
               "a described call fits into a descriptor");

/* -- where things lie ------------------------------------------------------------------------ */

static size_t part_pitch(size_t bytes) { return round_up(bytes, 16); }

static bool fits_descriptor(const execution *x, size_t parts, size_t bytes) {
    return parts * part_pitch(bytes) <= x->g->described_most;
}

/* Where part `part` of what `source` contributed in this step lies. */
static char *part_address(const execution *x, int source, size_t part, size_t step) {
    size_t pitch = x->g->calls.descriptor_pitch[source];
    if (pitch) return descriptor_of(x->g, source, x->number)->payload + part * pitch;
    return slot_of(x->g, source, x->number, step) + part * x->pitch;
}

/* Which bytes of a part of `bytes` that `source` contributes belong to this step. */
static span span_of(const execution *x, int source, size_t bytes, size_t step) {
    if (x->g->calls.descriptor_pitch[source]) return (span){0, step ? 0 : bytes};
    size_t offset = step * x->piece;
    if (offset >= bytes) return (span){0, 0};
    return (span){offset, bytes - offset < x->piece ? bytes - offset : x->piece};
}

/* Cut `bytes` into steps of at most `most` bytes and about equal length. */
static void cut_evenly(execution *x, size_t bytes, size_t most) {
    x->steps = bytes > most ? (bytes + most - 1) / most : 1;
    x->piece = round_up((bytes + x->steps - 1) / x->steps, 64);
}

/* -- moving ---------------------------------------------------------------------------------- */

typedef struct copy { /* of user memory from `offset` on, from or to a row of bytes */
    const un_stream *stream;
    size_t offset;
    char *row;
    const execution *x;
    bool large;
} copy;

static un_status read_piece(const void *what, size_t offset, size_t bytes) {
    const copy *c = what;
    stream_read(c->row + offset, c->stream, c->offset + offset, bytes);
    return UN_OK;
}

static un_status write_piece(const void *what, size_t offset, size_t bytes) {
    const copy *c = what;
    if (c->x->fills_new_memory) make_pages(c->stream, c->offset + offset, bytes);
    stream_write(c->stream, c->offset + offset, c->row + offset, bytes, c->large);
    return UN_OK;
}

static void read_bytes(execution *x, char *to, const un_stream *from, size_t offset, size_t bytes) {
    if (x->has_copiers)
        run_shared(x, bytes, read_piece, &(copy){from, offset, to, x, false});
    else
        stream_read(to, from, offset, bytes);
}

static void write_bytes(execution *x, const un_stream *to, size_t offset, char *from, size_t bytes,
                        bool large) {
    if (x->has_copiers || x->fills_new_memory)
        run_shared(x, bytes, write_piece, &(copy){to, offset, from, x, large});
    else
        stream_write(to, offset, from, bytes, large);
}

static void bring_part(execution *x, const un_stream *from, size_t part, size_t step) {
    span s = span_of(x, me(x), from->bytes, step);
    if (s.bytes) read_bytes(x, part_address(x, me(x), part, step), from, s.offset, s.bytes);
}

static void take_part(execution *x, const un_stream *to, int source, size_t part, size_t step) {
    span s = span_of(x, source, to->bytes, step);
    if (s.bytes)
        write_bytes(x, to, s.offset, part_address(x, source, part, step), s.bytes, x->large);
}

/* What a rank sends to itself never leaves its memory. */
void copy_own(execution *x, const un_stream *to, const un_stream *from, size_t offset,
              size_t bytes) {
    if (!bytes) return;
    char *source = stream_direct(from, offset, bytes);
    if (source) {
        if (source != stream_direct(to, offset, bytes))
            write_bytes(x, to, offset, source, bytes, x->large);
        return;
    }
    char bounce[BOUNCE_BYTES];
    for (size_t done = 0; done < bytes; done += sizeof bounce) {
        size_t some = bytes - done < sizeof bounce ? bytes - done : sizeof bounce;
        stream_read(bounce, from, offset + done, some);
        stream_write(to, offset + done, bounce, some, false);
    }
}

/* Bytes of every part from `inside` on, combined with our own input from `offset` on. The result
 * goes to `slot` and to the same offset of `out`, either of which may be NULL. */
typedef struct combination {
    execution *x;
    size_t step, part, inside;
    const un_stream *own;
    size_t offset;
    char *slot;
    const un_stream *out;
} combination;

/* Where the parts of the others lie; our own is set by the caller. */
static inline void find_sources(const execution *x, const void **sources, size_t part, size_t step,
                                size_t inside) {
    for (int rank = 0; rank < x->g->ranks; rank++)
        if (rank != me(x)) sources[rank] = part_address(x, rank, part, step) + inside;
}

static void combine_from(const combination *c, const void **sources, size_t from, size_t bytes) {
    execution *x = c->x;
    un_group *g = x->g;
    const un_stream *own = c->own, *out = c->out;
    size_t offset = c->offset + from;
    find_sources(x, sources, c->part, c->step, c->inside + from);
    const char *mine = stream_direct(own, offset, bytes);
    char *slot = c->slot ? c->slot + from : NULL;
    char *to = out ? stream_direct(out, offset, bytes) : slot;
    char *also = out ? slot : NULL;
    size_t block = !mine || !to ? BOUNCE_BYTES : also ? COPIED_BYTES : bytes;
    if (out && x->fills_new_memory) make_pages(out, offset, bytes);
    _Alignas(64) char given[BOUNCE_BYTES], made[BOUNCE_BYTES];
    for (size_t done = 0; done < bytes; done += block) {
        size_t some = bytes - done < block ? bytes - done : block;
        char *result = to ? to + done : made;
        if (!mine) stream_read(given, own, offset + done, some);
        sources[g->rank] = mine ? mine + done : given;
        if (g->reach && !x->takes_tree)
            g->reach->combine(x, result, sources, some);
        else
            combine_sources(x, result, sources, some);
        if (!to) stream_write(out, offset + done, made, some, false);
        if (also) memcpy(also + done, result, some);
        for (int rank = 0; rank < g->ranks; rank++)
            if (rank != g->rank) sources[rank] = (const char *)sources[rank] + some;
    }
}

static un_status combine_piece(const void *what, size_t from, size_t bytes) {
    const void *sources[UN_MAX_RANKS];
    combine_from(what, sources, from, bytes);
    return UN_OK;
}

static void combine(const combination *c, size_t bytes) {
    execution *x = c->x;
    const void **sources = x->g->calls.sources;
    if (!bytes) return;
    if (x->descriptor_bytes && !x->g->reach) { /* a short call: the fast path */
        char *to = stream_direct(c->out, c->offset, bytes);
        sources[me(x)] = stream_direct(c->own, c->offset, bytes);
        if (to && sources[me(x)]) {
            find_sources(x, sources, c->part, c->step, c->inside);
            combine_sources(x, to, sources, bytes);
            return;
        }
    }
    if (x->has_copiers)
        run_shared(x, bytes, combine_piece, c);
    else
        combine_from(c, sources, 0, bytes);
}

/* -- nothing to move ------------------------------------------------------------------------- */

void do_nothing(execution *x, size_t step) { (void)x, (void)step; }

/* -- all_reduce, reduce ---------------------------------------------------------------------- */

static bool wants_result(const execution *x) {
    return x->call->operation != UN_REDUCE || x->call->root == me(x);
}

static void bring_all(execution *x, size_t step) { bring_part(x, x->call->input, 0, step); }

/* Flat: every rank contributes everything and combines everything itself. */
static void take_flat(execution *x, size_t step) {
    if (!wants_result(x)) return;
    span s = span_of(x, me(x), x->call->input->bytes, step);
    combine(
        &(combination){x, step, .own = x->call->input, .offset = s.offset, .out = x->call->output},
        s.bytes);
}

/* Cut: every rank combines its share into its output and into its slot, in the place of its own
 * contribution to that share, which no other rank needs; then all copy out the rest. */
static void bring_cut(execution *x, size_t step) {
    span s = span_of(x, me(x), x->call->input->bytes, step);
    span mine = share_of_rank(x, me(x), s.bytes, LINE_BYTES);
    char *slot = part_address(x, me(x), 0, step);
    size_t after = mine.offset + mine.bytes;
    read_bytes(x, slot, x->call->input, s.offset, mine.offset);
    read_bytes(x, slot + after, x->call->input, s.offset + after, s.bytes - after);
}

static void combine_cut(execution *x, size_t step) {
    span s = span_of(x, me(x), x->call->input->bytes, step);
    span mine = share_of_rank(x, me(x), s.bytes, LINE_BYTES);
    combination c = {x, step, .inside = mine.offset, .own = x->call->input};
    c.offset = s.offset + mine.offset;
    c.slot = part_address(x, me(x), 0, step) + mine.offset;
    c.out = wants_result(x) ? x->call->output : NULL;
    combine(&c, mine.bytes);
}

static void take_cut(execution *x, size_t step) {
    if (!wants_result(x)) return;
    span s = span_of(x, me(x), x->call->input->bytes, step);
    for (int rank = 0; rank < x->g->ranks; rank++) {
        span share = share_of_rank(x, rank, s.bytes, LINE_BYTES);
        if (share.bytes && rank != me(x))
            write_bytes(x, x->call->output, s.offset + share.offset,
                        part_address(x, rank, 0, step) + share.offset, share.bytes, false);
    }
}

static void plan_all_reduce(execution *x) {
    size_t bytes = x->call->input->bytes;
    bool cut = bytes >= x->g->cut_from;
    cut_evenly(x, bytes, CUT_STEP_BYTES);
    x->bring = cut ? bring_cut : bring_all;
    x->combine = cut ? combine_cut : NULL;
    x->take = cut ? take_cut : take_flat;
}

/* -- broadcast ------------------------------------------------------------------------------- */

static void bring_if_root(execution *x, size_t step) {
    if (me(x) == x->call->root) bring_all(x, step);
}

static void take_from_root(execution *x, size_t step) {
    if (me(x) != x->call->root) take_part(x, x->call->output, x->call->root, 0, step);
}

/* Only the root's slots are in use, so that a step may fill one; but there should be enough
 * steps that the others read one while the root writes the next. */
static void plan_broadcast(execution *x) {
    size_t bytes = x->call->input->bytes, most = bytes / 8;
    if (most < STEP_BYTES) most = STEP_BYTES;
    cut_evenly(x, bytes, most < SLOT_BYTES ? most : SLOT_BYTES);
    x->bring = bring_if_root;
    x->take = take_from_root;
}

/* -- all_gather, reduce_scatter -------------------------------------------------------------- */

static size_t widest(const un_stream *parts, int ranks) {
    size_t most = 0;
    for (int rank = 0; rank < ranks; rank++)
        if (parts[rank].bytes > most) most = parts[rank].bytes;
    return most;
}

static void take_from_others(execution *x, size_t step) {
    for (int rank = 0; rank < x->g->ranks; rank++)
        if (rank != me(x)) take_part(x, &x->call->output[rank], rank, 0, step);
}

/* Our own piece into our slot and into our output at once; not in the first step, when no rank
 * knows yet whether the calls match. */
static void bring_and_keep(execution *x, size_t step) {
    const un_stream *from = x->call->input, *to = &x->call->output[me(x)];
    span s = span_of(x, me(x), from->bytes, step);
    if (step && s.bytes) {
        const char *source = stream_direct(from, s.offset, s.bytes);
        char *target = stream_direct(to, s.offset, s.bytes);
        if (source && target && source != target) {
            copy_twice(part_address(x, me(x), 0, step), target, source, s.bytes);
            return;
        }
        copy_own(x, to, from, s.offset, s.bytes);
    }
    bring_all(x, step);
}

static void take_gathered(execution *x, size_t step) {
    take_from_others(x, step);
    if (!step)
        copy_own(x, &x->call->output[me(x)], x->call->input, 0,
                 span_of(x, me(x), x->call->input->bytes, 0).bytes);
}

static void plan_all_gather(execution *x) {
    cut_evenly(x, widest(x->call->output, x->g->ranks), STEP_BYTES);
    x->bring = bring_and_keep;
    x->take = take_gathered;
}

static void bring_parts(execution *x, size_t step) {
    for (int rank = 0; rank < x->g->ranks; rank++)
        if (rank != me(x)) bring_part(x, &x->call->input[rank], (size_t)rank, step);
}

static void take_scattered_sum(execution *x, size_t step) {
    span s = span_of(x, me(x), x->call->output->bytes, step);
    combination c = {x, step, .part = (size_t)me(x), .own = &x->call->input[me(x)]};
    c.offset = s.offset;
    c.out = x->call->output;
    combine(&c, s.bytes);
}

/* The bytes that one part may take of a slot that holds one for each rank. */
static size_t slot_share(const execution *x) {
    size_t share = SLOT_BYTES / (size_t)x->g->ranks / 64 * 64;
    return share < STEP_BYTES ? share : STEP_BYTES;
}

static void plan_reduce_scatter(execution *x) {
    cut_evenly(x, widest(x->call->input, x->g->ranks), slot_share(x));
    x->bring = bring_parts;
    x->take = take_scattered_sum;
}

/* -- gather, scatter, all_to_all: every pair of ranks has a size of its own -------------------- */

/* Publish how many bytes we send to and expect from each rank. */
static void write_sizes(execution *x) {
    const un_call *call = x->call;
    size_t ranks = (size_t)x->g->ranks;
    uint64_t *to = sizes_of(x->g, me(x), x->number), *from = to + ranks;
    memset(to, 0, 2 * ranks * sizeof *to);
    bool root = me(x) == call->root;
    for (size_t rank = 0; rank < ranks; rank++) {
        if (call->operation == UN_ALL_TO_ALL || (call->operation == UN_SCATTER && root))
            to[rank] = call->input[rank].bytes;
        if (call->operation == UN_ALL_TO_ALL || (call->operation == UN_GATHER && root))
            from[rank] = call->output[rank].bytes;
    }
    if (call->operation == UN_GATHER) to[call->root] = call->input->bytes;
    if (call->operation == UN_SCATTER) from[call->root] = call->output->bytes;
}

static bool sizes_agree(execution *x) {
    int ranks = x->g->ranks;
    for (int giver = 0; giver < ranks; giver++) {
        if (x->call->operation == UN_SCATTER && giver != x->call->root) continue;
        const uint64_t *to = sizes_of(x->g, giver, x->number);
        for (int taker = 0; taker < ranks; taker++) {
            if (x->call->operation == UN_GATHER && taker != x->call->root) continue;
            if (to[taker] != sizes_of(x->g, taker, x->number)[ranks + giver]) return false;
        }
    }
    return true;
}

static size_t parts_per_slot(const execution *x) {
    return x->call->operation == UN_GATHER ? 1 : (size_t)x->g->ranks;
}

static size_t most_given_by(const execution *x, int giver) {
    const uint64_t *to = sizes_of(x->g, giver, x->number);
    size_t most = 0;
    for (int taker = 0; taker < x->g->ranks; taker++)
        if (taker != giver && to[taker] > most) most = to[taker];
    return most;
}

/* Where `giver`'s parts lie follows from its sizes, which every rank can read. */
static void place_giver(execution *x, int giver) {
    size_t most = most_given_by(x, giver);
    bool fits = fits_descriptor(x, parts_per_slot(x), most);
    x->g->calls.descriptor_pitch[giver] = fits ? part_pitch(most ? most : 1) : 0;
    size_t steps = fits ? 1 : (most + x->piece - 1) / x->piece;
    if (steps > x->steps) x->steps = steps;
}

static void place_givers(execution *x) {
    for (int rank = 0; rank < x->g->ranks; rank++) {
        place_giver(x, rank);
        x->takes_lanes |= x->g->reach && !x->g->calls.descriptor_pitch[rank];
    }
}

static void bring_gather(execution *x, size_t step) {
    if (me(x) != x->call->root) bring_all(x, step);
}

/* At the very end, when no peer waits for us any more. */
static void copy_own_last(execution *x, const un_stream *to, const un_stream *from, size_t step) {
    if (step + 1 == x->steps) copy_own(x, to, from, 0, from->bytes);
}

static void take_gather(execution *x, size_t step) {
    if (me(x) != x->call->root) return;
    take_from_others(x, step);
    copy_own_last(x, &x->call->output[me(x)], x->call->input, step);
}

static void bring_scatter(execution *x, size_t step) {
    if (me(x) == x->call->root) bring_parts(x, step);
}

static void take_scatter(execution *x, size_t step) {
    if (me(x) == x->call->root)
        copy_own_last(x, x->call->output, &x->call->input[me(x)], step);
    else
        take_part(x, x->call->output, x->call->root, (size_t)me(x), step);
}

static void take_all_to_all(execution *x, size_t step) {
    for (int rank = 0; rank < x->g->ranks; rank++)
        if (rank != me(x)) take_part(x, &x->call->output[rank], rank, (size_t)me(x), step);
    copy_own_last(x, &x->call->output[me(x)], &x->call->input[me(x)], step);
}

static void plan_pairs(execution *x, stage *bring, stage *take) {
    x->piece = x->pitch = x->call->operation == UN_GATHER ? STEP_BYTES : slot_share(x);
    x->steps = 1;
    write_sizes(x);
    place_giver(x, me(x));
    x->bring = bring;
    x->take = take;
    x->pairs_agree = sizes_agree;
    x->learn = place_givers;
    size_t pitch = x->g->calls.descriptor_pitch[me(x)];
    x->needs_slice = !pitch && !x->g->reach;
    x->payload_bytes = most_given_by(x, me(x)) ? pitch * parts_per_slot(x) : 0;
    if (!pitch && x->g->reach) x->bring = do_nothing;
    x->large = most_given_by(x, me(x)) >= BYPASS_FROM;
}

/* -- choosing -------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 32;
}

/* Operations to which all ranks contribute equally: each knows all sizes from its arguments. */
static void plan_alike(execution *x) {
    const un_call *call = x->call;
    int ranks = x->g->ranks;
    const un_stream *wide = NULL;
    size_t parts = 1;
    switch (call->operation) {
    case UN_BROADCAST: plan_broadcast(x); break;
    case UN_ALLOCATE:
    case UN_ALL_GATHER: plan_all_gather(x), wide = call->output; break;
    case UN_REDUCE_SCATTER:
        plan_reduce_scatter(x), wide = call->input, parts = (size_t)ranks;
        break;
    default: plan_all_reduce(x); break;
    }
    x->pitch = x->piece;

    size_t bytes = wide ? widest(wide, ranks) : call->input->bytes;
    bool fits = !x->combine && fits_descriptor(x, parts, bytes);
    size_t pitch = fits ? part_pitch(bytes ? bytes : 1) : 0;
    for (int rank = 0; rank < ranks; rank++) x->g->calls.descriptor_pitch[rank] = pitch;
    if (fits) x->steps = 1, x->descriptor_bytes = bytes < 256 ? bytes : 256;
    x->takes_lanes = !fits && x->g->reach;
    if (x->takes_lanes) x->bring = do_nothing;
    bool gives = bytes && (call->operation != UN_BROADCAST || call->root == me(x));
    x->payload_bytes = gives ? parts * pitch : 0;
    x->needs_slice = !fits && !x->g->reach &&
                     (call->operation != UN_BROADCAST || call->root == me(x));

    x->bytes = wide ? 0 : bytes;
    for (int rank = 0; wide && rank < ranks; rank++) {
        x->bytes += wide[rank].bytes;
        x->hash = mix(x->hash, wide[rank].bytes);
    }
    x->large = x->bytes >= BYPASS_FROM;
}

/* A group of one: what it contributes is the result. */
static void take_own(execution *x, size_t step) {
    const un_stream *from = x->call->input, *to = x->call->output;
    if (x->reducer.run && x->call->reduction == UN_PREMUL_SUM)
        combine(&(combination){x, step, .own = from, .out = to}, from->bytes);
    else if (from != to)
        copy_own(x, to, from, 0, from->bytes);
}

/* Fewer than four contributions have no other order than that of ranks; over hosts they may. */
static bool takes_tree(const execution *x) {
    const un_call *call = x->call;
    bool selects = call->reduction == UN_MIN || call->reduction == UN_MAX;
    return call->form & UN_CONTRIBUTIONS ||
           (call->form & UN_REPRODUCIBLE && depends_on_order(call->dtype) &&
            (x->g->reach || (x->g->ranks > 3 && !selects)));
}

static bool fills_new_memory(const execution *x) {
    const un_call *call = x->call;
    un_operation o = call->operation;
    bool is_root = call->root == me(x);
    if (o == UN_GATHER && !is_root) return false; /* only the root has an output, */
    const un_stream *to = call->output, *from = o == UN_SCATTER && !is_root ? NULL : call->input;
    bool wide = o == UN_ALL_GATHER || o == UN_ALL_TO_ALL || o == UN_GATHER; /* scatter: input */
    if (wide) to += (me(x) + 1) % x->g->ranks;
    if (!to->bytes) return false;
    bool in_place = !wide && from && from->bytes && from->views->data == to->views->data;
    return !in_place && stream_is_new(to);
}

un_status plan_execution(execution *x) {
    const un_call *call = x->call;
    x->hash = call->shape_hash;
    if (un_reduces(call->operation)) {
        x->reducer = find_reducer(call->dtype, call->reduction);
        if (!x->reducer.run) return UN_REFUSED;
        if (call->reduction == UN_PREMUL_SUM) {
            uint64_t factor;
            memcpy(&factor, &call->factor, sizeof factor);
            x->hash = mix(x->hash, factor);
        }
        x->takes_tree = takes_tree(x);
        if (call->form & UN_CONTRIBUTIONS) {
            plan_contributions(x);
            return UN_OK;
        }
    }
    if (call->schedule) {
        x->hash = mix(x->hash, call->schedule->hash);
        x->bring = do_nothing;
        return plan_schedule(x);
    }
    switch (x->g->ranks == 1 ? UN_BARRIER : call->operation) {
    case UN_BARRIER: /* with or without data of one's own */
        x->bring = do_nothing;
        x->take = take_own;
        x->steps = 1;
        break;
    case UN_GATHER: plan_pairs(x, bring_gather, take_gather); break;
    case UN_SCATTER: plan_pairs(x, bring_scatter, take_scatter); break;
    case UN_ALL_TO_ALL: plan_pairs(x, bring_parts, take_all_to_all); break;
    default: plan_alike(x); break;
    }
    if (!x->g->reach && (x->pairs_agree || x->bytes >= COPIERS_FROM) &&
        bytes_of(x->g, call) >= COPIERS_FROM) {
        x->has_copiers = x->g->copiers.wanted;
        x->fills_new_memory = fills_new_memory(x);
    }
    plan_direct(x);
    return UN_OK;
}
