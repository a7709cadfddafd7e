/* Compiled schedules: all_reduce and broadcast as rounds of sends and receives that the caller
 * passes.
 *
 * Each ordered pair of ranks has a FIFO, a ring of bytes with one writer and one reader: the sender
 * copies a chunk into it, the receiver copies or combines it from there into its own tensor. A
 * large tensor is cut into slices, each of which is sent through the whole schedule; slice s is in
 * round r at time s + r, so that all rounds are busy with different slices at once.
 *
 * Why no rank waits forever: all moves between two ranks at one time fit into half a FIFO, and
 * at any time a rank writes everything before it reads anything. So a writer waits only for
 * reads of earlier times, a reader only for writes of the same time or an earlier one, and the
 * ranks furthest behind can proceed. */
#include "local/call.h"
#include "base/segment.h"
#include "base/stream.h"

enum {
    SLICE_BYTES = 128 * 1024,
    PIECE_BYTES = 32 * 1024, /* of a chunk, published at once, so that the reader can start */
};

_Static_assert(UN_BUSIEST * 16 <= FIFO_BYTES / 2, "one element per chunk must fit");

/* -- reading ----------------------------------------------------------------------------------- */

static bool is_sound(const un_move *m, int64_t chunks, int rank, int ranks, bool sends) {
    return m->peer >= 0 && m->peer < ranks && m->peer != rank && m->chunk >= 0 && m->count > 0 &&
           m->count <= chunks && m->chunk <= chunks - m->count &&
           (sends ? m->action == UN_PUT : m->action == UN_COPY || m->action == UN_COMBINE);
}

bool un_schedule_read(un_compiled_schedule *s, const int64_t *integers, size_t count, int rank,
                      int ranks) {
    const size_t head = 4, most = (size_t)1 << 40, per_move = sizeof(un_move) / sizeof *integers;
    if (count <= head) return false;
    *s = (un_compiled_schedule){.hash = (uint64_t)integers[0],
                                .rounds = integers[1],
                                .chunks = integers[2],
                                .busiest = integers[3],
                                .starts = integers + head};
    if (s->rounds < 0 || (size_t)s->rounds > most || s->chunks < 1 || (size_t)s->chunks > most ||
        s->busiest < 0 || s->busiest > UN_BUSIEST)
        return false;
    size_t starts = 2 * (size_t)s->rounds + 1;
    if (count < head + starts || (count - head - starts) % per_move) return false;
    int64_t moves = (int64_t)((count - head - starts) / per_move);
    s->moves = (const un_move *)(integers + head + starts);
    if (s->starts[0] != 0 || s->starts[starts - 1] != moves) return false;
    for (size_t part = 0; part + 1 < starts; part++) {
        if (s->starts[part] > s->starts[part + 1] || s->starts[part + 1] > moves) return false;
        for (int64_t move = s->starts[part]; move < s->starts[part + 1]; move++)
            if (!is_sound(&s->moves[move], s->chunks, rank, ranks, part % 2 == 0)) return false;
    }
    return true;
}

/* -- where chunks lie -------------------------------------------------------------------------- */

static size_t item_bytes_of(const execution *x) {
    size_t bits = x->call->dtype >> 8 & 0xff;
    return bits < 8 ? 1 : bits / 8;
}

/* Where part `part` begins if `items` are cut into `parts`; the first ones get the remainder. */
static size_t cut(size_t items, size_t parts, size_t part) {
    size_t over = items % parts;
    return items / parts * part + (part < over ? part : over);
}

static span slice_of(const execution *x, size_t slice) {
    size_t item = item_bytes_of(x), items = x->call->output->bytes / item;
    size_t begin = cut(items, x->slices, slice), end = cut(items, x->slices, slice + 1);
    return (span){begin * item, (end - begin) * item};
}

static span chunks_of(const execution *x, const un_move *m, size_t slice) {
    span whole = slice_of(x, slice);
    size_t item = item_bytes_of(x), items = whole.bytes / item;
    size_t chunks = (size_t)x->call->schedule->chunks;
    size_t begin = cut(items, chunks, (size_t)m->chunk);
    size_t end = cut(items, chunks, (size_t)(m->chunk + m->count));
    return (span){whole.offset + begin * item, (end - begin) * item};
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* -- moving ------------------------------------------------------------------------------------ */

static un_status put(execution *x, const un_move *m, span s) {
    un_group *g = x->g;
    int peer = (int)m->peer;
    fifo *t = fifo_of(g, g->rank, peer);
    uint64_t *written = &g->fifos[peer].written;
    for (size_t done = 0, part; done < s.bytes; done += part) {
        size_t inside = *written % FIFO_BYTES;
        part = least(least(s.bytes - done, PIECE_BYTES), FIFO_BYTES - inside);
        uint64_t end = *written + part;
        if (end > FIFO_BYTES) {
            un_status status = await_flag(g, peer, &t->read, end - FIFO_BYTES, &x->patience);
            if (status) return status;
        }
        stream_read(t->ring + inside, x->call->output, s.offset + done, part);
        *written = end;
        publish(g, &t->written, end);
    }
    return UN_OK;
}

/* Combine bytes of `own` with others, or with none, into our output; `behind`: the others come
 * first. So two ranks combine in the order of the engine's own algorithm: even a NaN has the
 * same bits. */
static void combine(const execution *x, reducer r, const un_stream *own, size_t offset,
                    const char *other, bool behind, size_t bytes, double factor) {
    if (!bytes) return;
    const un_stream *out = x->call->output;
    char *to = stream_direct(out, offset, bytes);
    const char *from = own == out ? to : stream_direct(own, offset, bytes);
    if (to && from) {
        const void *both[] = {behind ? other : from, behind ? from : other};
        r.run(to, both, other ? 2 : 1, bytes / r.unit, factor);
        return;
    }
    _Alignas(64) char bounce[BOUNCE_BYTES];
    for (size_t done = 0, part; done < bytes; done += part) {
        part = least(bytes - done, sizeof bounce);
        stream_read(bounce, own, offset + done, part);
        const void *theirs = other ? other + done : NULL;
        const void *both[] = {behind ? theirs : bounce, behind ? bounce : theirs};
        r.run(bounce, both, other ? 2 : 1, part / r.unit, factor);
        stream_write(out, offset + done, bounce, part, false);
    }
}

static un_status take(execution *x, const un_move *m, span s) {
    un_group *g = x->g;
    int peer = (int)m->peer;
    fifo *t = fifo_of(g, peer, g->rank);
    uint64_t *read = &g->fifos[peer].read;
    for (size_t done = 0, part; done < s.bytes; done += part) {
        size_t inside = *read % FIFO_BYTES;
        part = least(least(s.bytes - done, PIECE_BYTES), FIFO_BYTES - inside);
        un_status status = await_flag(g, peer, &t->written, *read + part, &x->patience);
        if (status) return status;
        if (m->action == UN_COPY)
            stream_write(x->call->output, s.offset + done, t->ring + inside, part, false);
        else
            combine(x, x->reducer, x->call->output, s.offset + done, t->ring + inside,
                    peer < g->rank, part, 1);
        *read += part;
        publish(g, &t->read, *read);
    }
    return UN_OK;
}

/* Before its first round: our contribution, scaled if the reduction asks for it. */
static void begin_slice(execution *x, size_t slice) {
    const un_call *call = x->call;
    span s = slice_of(x, slice);
    if (!x->reducer.run) return; /* a broadcast, whose reduction marks its schedule */
    if (call->reduction == UN_PREMUL_SUM)
        combine(x, find_reducer(call->dtype, UN_PREMUL_SUM), call->input, s.offset, NULL, false,
                s.bytes, call->factor);
    else if (call->input != call->output) /* the sum of one is a copy of it */
        combine(x, x->reducer, call->input, s.offset, NULL, false, s.bytes, 1);
}

static void end_slice(execution *x, size_t slice) {
    span s = slice_of(x, slice);
    if (x->reducer.run && un_averages(x->call->reduction))
        combine(x, find_reducer(x->call->dtype, (un_reduction)DIVISION), x->call->output, s.offset,
                NULL, false, s.bytes, x->g->ranks);
}

/* All moves of round `round` in one direction. */
static un_status run_round(execution *x, size_t round, size_t slice, bool sends) {
    const un_compiled_schedule *schedule = x->call->schedule;
    const int64_t *starts = schedule->starts + 2 * round + (sends ? 0 : 1);
    for (int64_t move = starts[0]; move < starts[1]; move++) {
        const un_move *m = &schedule->moves[move];
        span s = chunks_of(x, m, slice);
        un_status status = sends ? put(x, m, s) : take(x, m, s);
        if (status) return status;
    }
    return UN_OK;
}

un_status run_schedule(execution *x) {
    size_t rounds = (size_t)x->call->schedule->rounds;
    size_t steps = rounds ? rounds : 1; /* a single rank still has a slice to begin and end */
    for (size_t time = 0; time < x->slices + steps - 1; time++) {
        size_t oldest = time < steps ? 0 : time - steps + 1;
        if (time < x->slices) begin_slice(x, time);
        for (int sends = 1; sends >= 0; sends--)
            for (size_t slice = oldest; rounds && slice <= time && slice < x->slices; slice++) {
                un_status status = run_round(x, time - slice, slice, sends);
                if (status) return status;
            }
        if (time + 1 >= steps) end_slice(x, oldest);
    }
    return UN_OK;
}

/* -- planning ---------------------------------------------------------------------------------- */

/* Enough that a slice stays in the cache, and that all data in a FIFO at once fits into half of
 * it. All ranks compute the same number. */
static size_t slices_for(const execution *x) {
    const un_compiled_schedule *schedule = x->call->schedule;
    size_t item = item_bytes_of(x), items = x->call->output->bytes / item;
    size_t busiest = schedule->busiest ? (size_t)schedule->busiest : 1;
    size_t chunk_items = FIFO_BYTES / 2 / item / busiest;
    size_t most = least(chunk_items * (size_t)schedule->chunks, SLICE_BYTES / item);
    if (most < (size_t)schedule->chunks) most = (size_t)schedule->chunks;
    return items > most ? (items + most - 1) / most : 1;
}

/* Elements in a FIFO lie at multiples of their size: each call starts on a new line. */
static void align_fifos(un_group *g) {
    for (int rank = 0; rank < g->ranks; rank++) {
        g->fifos[rank].written = round_up(g->fifos[rank].written, LINE_BYTES);
        g->fifos[rank].read = round_up(g->fifos[rank].read, LINE_BYTES);
    }
}

un_status plan_schedule(execution *x) {
    const un_call *call = x->call;
    const un_compiled_schedule *schedule = call->schedule;
    if (x->g->reach) return UN_REFUSED; /* FIFOs do not reach other hosts */
    bool adds = un_averages(call->reduction) || call->reduction == UN_PREMUL_SUM;
    if (x->reducer.run && adds) x->reducer = find_reducer(call->dtype, UN_SUM);
    x->bytes = call->input->bytes;
    x->slices = slices_for(x);
    for (int64_t move = 0; move < schedule->starts[2 * schedule->rounds]; move++) {
        if (schedule->moves[move].action == UN_COMBINE && !x->reducer.run) return UN_REFUSED;
        if (schedule->moves[move].action != UN_PUT) continue;
        un_status status = prepare_fifo(x->g, (int)schedule->moves[move].peer);
        if (status) return status;
    }
    align_fifos(x->g);
    return UN_OK;
}
