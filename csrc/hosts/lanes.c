/* Large calls over hosts.
 *
 * Ranks of one host combine and share through their inner group; data between hosts is sent
 * directly from memory to memory, and crosses the network once for each host that needs it. A sum
 * is scattered: for each rank of another host, its mate combines the contributions of this host and
 * sends the result there; that rank combines the hosts' sums. all_reduce assigns every rank a share
 * of the tensor, and gathers the shares. So the j-th ranks of all hosts form a lane. Tensors move
 * in chunks, several at a time: while one crosses the network the next is combined.
 *
 * A failed call returns only once nothing uses its caller's memory any more.
 */
#include <stdlib.h>

#include "base/packed.h"
#include "hosts/data.h"
#include "base/stream.h"

enum {
    LANE_BYTES = 512 * 1024,      /* of a chunk, for each lane */
    ROW_BYTES = 256 * 1024,       /* of each rank's row in a chunk */
    CHAIN_BYTES = 512 * 1024,     /* of a broadcast, forwarded by a host at once */
    DEPTH = 5,                    /* chunks in flight, */
    AHEAD = DEPTH - 1,            /* before the first of them is needed */
    GRACE_NS = 500 * 1000 * 1000, /* for our host: who waits for another host knows more */
};

/* -- inside a host --------------------------------------------------------------------------------- */

static un_stream stream_of(const row *rows, size_t count, un_view *views) {
    un_stream s = {.views = views, .count = count};
    for (size_t i = 0; i < count; i++) {
        views[i] = (un_view){.data = rows[i].data, .bytes = rows[i].bytes, .start = s.bytes};
        s.bytes += rows[i].bytes;
    }
    return s;
}

/* A call of the inner group. If it fails, so does this call. */
static un_status run_inside(lane_call *l, un_operation operation, int root, const un_stream *input,
                            const un_stream *output) {
    un_group *g = l->g, *inner = l->hosts->inner;
    un_call call = l->inner;
    call.operation = operation;
    call.root = root;
    call.input = input;
    call.output = output;
    call.timeout_ns = l->x->patience.deadline_ns - clock_ns() + GRACE_NS;
    if (call.timeout_ns < 1) call.timeout_ns = 1;
    drive_network();
    un_status status = un_run(inner, &call);
    if (!status) return UN_OK;
    un_failure f = un_group_failure(inner);
    const host *here = &l->hosts->host[l->hosts->mine];
    int rank = f.rank >= 0 && f.rank < here->count ? here->ranks[f.rank] : -1;
    if (!status_from_abort(g)) { /* the outer group reports the cause, as soon as it knows it */
        if (status == UN_INTERRUPTED) return interrupt(g, l->x->number);
        abort_group(g, status, rank, l->x->number);
    }
    return fail_from_abort(g);
}

static char *scratch(lane_call *l, int which, size_t bytes) {
    hosts *hs = l->hosts;
    if (hs->scratch_bytes[which] < bytes) {
        free(hs->scratch[which]);
        hs->scratch[which] = aligned_alloc(LINE_BYTES, round_up(bytes, LINE_BYTES));
        hs->scratch_bytes[which] = hs->scratch[which] ? bytes : 0;
    }
    if (bytes && !hs->scratch[which]) abort_group(l->g, UN_NO_MEMORY, l->g->rank, l->x->number);
    return hs->scratch[which];
}

/* Where part `part` begins if `items` are divided into `parts`; the first ones get the remainder. */
static size_t part_begin(size_t items, size_t parts, size_t part) {
    size_t over = items % parts;
    return items / parts * part + (part < over ? part : over);
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* -- all_gather ----------------------------------------------------------------------------------------- */

static row slice_of(row whole, size_t offset, size_t bytes) {
    if (offset >= whole.bytes) return (row){whole.data, 0};
    return (row){whole.data + offset, least(bytes, whole.bytes - offset)};
}

static void slice_rows(const row *rows, int count, size_t offset, size_t bytes, row *slices) {
    for (int rank = 0; rank < count; rank++) slices[rank] = slice_of(rows[rank], offset, bytes);
}

static size_t longest_of(const row *rows, int count) {
    size_t longest = 0;
    for (int rank = 0; rank < count; rank++)
        longest = rows[rank].bytes > longest ? rows[rank].bytes : longest;
    return longest;
}

/* Which rows the index-th rank of this host passes to the others: its own, then those that it
 * receives. Returns how many. */
static size_t rows_heard_by(const hosts *hs, int index, const row *rows, int *ranks, row *heard) {
    const host *here = &hs->host[hs->mine];
    size_t count = 0;
    ranks[count++] = here->ranks[index];
    for (int h = 0; h < hs->count; h++)
        for (int i = index; h != hs->mine && i < hs->host[h].count; i += here->count)
            ranks[count++] = hs->host[h].ranks[i];
    for (size_t i = 0; i < count; i++) heard[i] = rows[ranks[i]];
    return count;
}

/* Our own row is in place; send it to the other hosts, and receive theirs. */
static void begin_gather(lane_call *l, const row *rows, batch *b) {
    const hosts *hs = l->hosts;
    int ranks[UN_MAX_RANKS];
    row heard[UN_MAX_RANKS];
    size_t count = rows_heard_by(hs, hs->index, rows, ranks, heard);
    for (size_t i = 1; i < count; i++) want(l, b, ranks[i], heard[i].data, heard[i].bytes);
    for (int step = 1; step < hs->count; step++)
        give(l, b, mate_on(hs, (hs->mine + step) % hs->count), heard[0].data, heard[0].bytes);
}

/* The ranks of this host share what they have received. */
static un_status finish_gather(lane_call *l, const row *rows, batch *b) {
    const hosts *hs = l->hosts;
    int ranks[UN_MAX_RANKS];
    un_status status = land(l, b);
    if (status) return status;
    un_stream output[UN_MAX_RANKS];
    un_view views[UN_MAX_RANKS];
    row heard[UN_MAX_RANKS];
    size_t used = 0;
    for (int index = 0; index < hs->host[hs->mine].count; index++) {
        size_t count = rows_heard_by(hs, index, rows, ranks, heard);
        output[index] = stream_of(heard, count, views + used);
        used += count;
    }
    return run_inside(l, UN_ALL_GATHER, 0, &output[hs->index], output);
}

static un_status gather_rows(lane_call *l, const row *rows) {
    size_t chunks = (longest_of(rows, l->g->ranks) + ROW_BYTES - 1) / ROW_BYTES;
    row slices[UN_MAX_RANKS];
    batch batches[DEPTH] = {0};
    un_status status = UN_OK;
    for (size_t time = 0; !status && time < chunks + AHEAD; time++) {
        slice_rows(rows, l->g->ranks, time * ROW_BYTES, ROW_BYTES, slices);
        if (time < chunks) begin_gather(l, slices, &batches[time % DEPTH]);
        if (time < AHEAD) continue;
        slice_rows(rows, l->g->ranks, (time - AHEAD) * ROW_BYTES, ROW_BYTES, slices);
        status = finish_gather(l, slices, &batches[(time - AHEAD) % DEPTH]);
    }
    for (int i = 0; i < DEPTH; i++) end_batch(l, &batches[i]);
    return status;
}

/* -- sums: reduce_scatter, all_reduce, reduce ------------------------------------------------------------ */

typedef struct lane_sum {
    lane_call *l;
    host_arithmetic a;
    host_tree *tree;              /* of a reproducible sum; NULL: hosts have one sum each */
    char *wide, *sums, *theirs;   /* of DEPTH chunks each, except `wide` */
    char *taken;                  /* of a reproducible sum: from the ranks of our host */
    un_wire wire;                 /* of an all_reduce: how sums cross; then of DEPTH chunks, */
    char *sent, *results;         /* packed: the sums that we send; the result of each rank */
    float *unpacked;              /* a row from each host */
    const char *in, *out;         /* the tensors whose rows are reduced */
    size_t packed_row, sent_rows; /* bytes of one; how many we send of a chunk */
    size_t sum_bytes, row_bytes;
    batch scattered[DEPTH], gathered[DEPTH];
} lane_sum;

static size_t wide_bytes_of(const lane_sum *r, size_t bytes) {
    return bytes / r->a.item_bytes * r->a.wide_bytes;
}

static char *sums_of(const lane_sum *r, size_t chunk) {
    return r->sums + chunk % DEPTH * r->sum_bytes;
}

static size_t sums_by(const lane_sum *r, int host) { return r->tree ? r->tree->count[host] : 1; }
static size_t sums_before(const lane_sum *r, int host) {
    return r->tree ? r->tree->begin[host] : (size_t)host;
}

static char *theirs_of(const lane_sum *r, size_t chunk, int host) {
    size_t each = sums_before(r, r->l->hosts->count);
    return r->theirs + (chunk % DEPTH * each + sums_before(r, host)) * r->row_bytes;
}

/* A row of a chunk has at most `most_bytes`, and all together at most `chunk_bytes`. */
static un_status prepare_sum(lane_sum *r, lane_call *l, size_t most_bytes, size_t chunk_bytes) {
    size_t heard = 1;
    for (int rank = 0; rank < l->g->ranks; rank++) heard += is_heard_here(l->g, rank);
    r->l = l;
    if (l->x->takes_tree && !(r->tree = make_host_tree(l->x))) return UN_NO_MEMORY;
    size_t own = r->tree ? r->tree->own : 1;
    r->row_bytes = round_up(wide_bytes_of(r, most_bytes), LINE_BYTES);
    r->sum_bytes = heard * r->row_bytes * sums_by(r, l->hosts->mine);
    if (r->a.widen || r->tree) r->wide = scratch(l, 0, own * wide_bytes_of(r, chunk_bytes));
    r->sums = scratch(l, 1, DEPTH * r->sum_bytes);
    r->theirs = scratch(l, 2, DEPTH * sums_before(r, l->hosts->count) * r->row_bytes);
    if (r->tree) r->taken = scratch(l, 4, r->tree->here * heard * r->row_bytes);
    r->wire = un_wire_of(l->x->call->form);
    if (r->wire) {
        r->packed_row = round_up(packed_bytes(r->wire, most_bytes / r->a.item_bytes), LINE_BYTES);
        r->sent_rows = heard;
        r->sent = scratch(l, 5, DEPTH * heard * r->packed_row);
        r->results = scratch(l, 6, DEPTH * (size_t)l->g->ranks * r->packed_row);
        r->unpacked = (float *)(void *)scratch(l, 7, (size_t)l->hosts->count * r->row_bytes);
    }
    l->inner.dtype = r->a.dtype;
    l->inner.reduction = r->a.inside;
    return status_from_abort(l->g) ? fail_from_abort(l->g) : UN_OK;
}

/* Our nodes of a row, one after the other. */
static size_t begin_nodes(lane_sum *r, int rank, row given, char *to) {
    execution *x = r->l->x;
    size_t items = given.bytes / r->a.item_bytes, bytes = items * r->a.wide_bytes;
    const row *whole = &r->l->given[un_is_wide_input(x->call->operation) ? rank : 0];
    un_view view;
    un_stream part = stream_of(whole, 1, &view);
    for (size_t node = 0; items && node < r->tree->own; node++, to += bytes)
        if (x->several)
            reduce_contributions(x->several, &part, node,
                                 (size_t)(given.data - whole->data) / r->a.item_bytes, items, to,
                                 BEGINS);
        else
            reduce_nodes(&r->tree->arithmetic, NULL, 1, 1, to, (const void *[]){given.data}, items,
                         BEGINS);
    return r->tree->own * bytes;
}

/* As `begin_scatter`, of sums in a tree: a rank sends its nodes to each rank of its host, which
 * reduces them to the host's. */
static un_status begin_tree(lane_sum *r, size_t chunk, const row *rows) {
    lane_call *l = r->l;
    const hosts *hs = l->hosts;
    const host_tree *tree = r->tree;
    const host *here = &hs->host[hs->mine];
    int ranks[UN_MAX_RANKS];
    un_stream input[UN_MAX_RANKS], output[UN_MAX_RANKS];
    un_view in_views[UN_MAX_RANKS], out_views[UN_MAX_RANKS];
    row heard[UN_MAX_RANKS];
    char *at = r->wide, *taken[UN_MAX_RANKS], *next = r->taken;
    size_t rows_bytes = 0; /* of one node of all rows that we reduce */
    for (int index = 0; index < here->count; index++) {
        size_t count = rows_heard_by(hs, index, rows, ranks, heard);
        row all = {at, 0};
        for (size_t i = 0; i < count; i++)
            all.bytes += begin_nodes(r, ranks[i], heard[i], at + all.bytes);
        at += all.bytes;
        input[index] = stream_of(&all, 1, &in_views[index]);
        if (index == hs->index) rows_bytes = all.bytes / tree->own;
    }
    for (int index = 0; index < here->count; index++) {
        row all = {taken[index] = next, tree->of_rank[index] * rows_bytes};
        output[index] = stream_of(&all, 1, &out_views[index]);
        next += all.bytes;
    }
    batch *b = &r->scattered[chunk % DEPTH];
    size_t own = wide_bytes_of(r, rows[l->g->rank].bytes);
    for (int h = 0; h < hs->count; h++)
        if (h != hs->mine) want(l, b, mate_on(hs, h), theirs_of(r, chunk, h), own * sums_by(r, h));
    un_status status = run_inside(l, UN_ALL_TO_ALL, 0, input, output);
    size_t count = rows_heard_by(hs, hs->index, rows, ranks, heard), sums = sums_by(r, hs->mine);
    char *to = sums_of(r, chunk);
    for (size_t i = 0; !status && i < count; i++) {
        size_t items = heard[i].bytes / r->a.item_bytes, bytes = items * r->a.wide_bytes, used = 0;
        for (int index = 0; index < here->count; index++)
            for (size_t node = 0; node < tree->of_rank[index]; node++, taken[index] += bytes)
                tree->from[used++] = taken[index];
        for (size_t sum = 0, begin = 0; sum < sums; begin = tree->end[sum++])
            reduce_nodes(&tree->arithmetic, tree->nodes + begin, tree->end[sum] - begin,
                         tree->total, to + sum * bytes, tree->from + begin, items, 0);
        if (i) give(l, b, ranks[i], to, sums * bytes);
        to += sums * bytes;
    }
    return status;
}

/* -- sums and results in few bits: inside a host, too, results stay packed until they are there ------ */

static char *sent_of(const lane_sum *r, size_t chunk, size_t row) {
    return r->sent + (chunk % DEPTH * r->sent_rows + row) * r->packed_row;
}

/* The results of all ranks, whose rows in the tensor are `rows`. */
static void find_packed(const lane_sum *r, size_t chunk, const row *rows, row *packed) {
    size_t ranks = (size_t)r->l->g->ranks;
    for (size_t rank = 0; rank < ranks; rank++)
        packed[rank] = (row){r->results + (chunk % DEPTH * ranks + rank) * r->packed_row,
                             packed_bytes(r->wire, rows[rank].bytes / r->a.item_bytes)};
}

/* Pack `items` of a tensor from `first` on, and leave what that has lost. */
static void pack_row(lane_sum *r, char *to, const char *data, size_t first, size_t items,
                     float times) {
    float *residual = r->l->x->call->residual;
    const float *given = (const float *)(const void *)data;
    pack_floats(r->wire, to, given, items);
    if (residual) unpack_floats(r->wire, r->unpacked, to, items);
    for (size_t i = 0; residual && i < items; i++) {
        float lost = (given[i] - r->unpacked[i]) * times;
        residual[first + i] = lost - lost == 0 ? lost : 0; /* not of a NaN */
    }
}

/* All ranks unpack the same, and the one that has computed it, too. */
static void unpack_results(lane_sum *r, const row *packed, const row *rows) {
    for (int rank = 0; rank < r->l->g->ranks; rank++) {
        size_t items = rows[rank].bytes / r->a.item_bytes;
        float *to = r->a.narrow ? r->unpacked : (float *)(void *)rows[rank].data;
        if (items) unpack_floats(r->wire, to, packed[rank].data, items);
        if (items && r->a.narrow) convert(r->a.narrow, rows[rank].data, to, items);
    }
}

/* Each rank combines the rows of its mates on other hosts inside its host, and sends them. */
static un_status begin_scatter(lane_sum *r, size_t chunk, const row *rows) {
    if (r->tree) return begin_tree(r, chunk, rows);
    lane_call *l = r->l;
    const hosts *hs = l->hosts;
    size_t used = 0, total = 0, sums = 0;
    int ranks[UN_MAX_RANKS];
    un_stream input[UN_MAX_RANKS], output;
    un_view views[UN_MAX_RANKS], view;
    row heard[UN_MAX_RANKS];
    for (int index = 0; index < hs->host[hs->mine].count; index++) {
        size_t count = rows_heard_by(hs, index, rows, ranks, heard);
        for (size_t i = 0; i < count; i++) {
            size_t items = heard[i].bytes / r->a.item_bytes;
            if (r->wide) {
                convert(r->a.widen, r->wide + total, heard[i].data, items);
                heard[i].data = r->wide + total;
            }
            heard[i].bytes = items * r->a.wide_bytes;
            total += heard[i].bytes;
        }
        input[index] = stream_of(heard, count, views + used);
        used += count;
        if (index == hs->index) sums = input[index].bytes;
    }
    output = stream_of(&(row){sums_of(r, chunk), sums}, 1, &view);
    batch *b = &r->scattered[chunk % DEPTH];
    size_t own = wide_bytes_of(r, rows[l->g->rank].bytes);
    size_t crossing = r->wire ? packed_bytes(r->wire, own / r->a.wide_bytes) : own;
    for (int h = 0; h < hs->count; h++)
        if (h != hs->mine) want(l, b, mate_on(hs, h), theirs_of(r, chunk, h), crossing);
    un_status status = run_inside(l, UN_REDUCE_SCATTER, 0, input, &output);
    size_t count = rows_heard_by(hs, hs->index, rows, ranks, heard);
    char *at = sums_of(r, chunk) + own;
    for (size_t i = 1; !status && i < count; i++) {
        size_t bytes = wide_bytes_of(r, heard[i].bytes);
        char *packed = r->wire ? sent_of(r, chunk, i) : NULL;
        size_t first = r->wire ? (size_t)(heard[i].data - r->in) / r->a.item_bytes : 0;
        if (packed) pack_row(r, packed, at, first, bytes / r->a.wide_bytes, 1);
        give(l, b, ranks[i], packed ? packed : at,
             packed ? packed_bytes(r->wire, bytes / r->a.wide_bytes) : bytes);
        at += bytes;
    }
    return status;
}

/* Combine the hosts' sums of our row, which is `to`; on a wire into `packed`. */
static un_status finish_scatter(lane_sum *r, size_t chunk, row to, char *packed) {
    const hosts *hs = r->l->hosts;
    un_status status = land(r->l, &r->scattered[chunk % DEPTH]);
    if (status || !to.bytes) return status;
    char *own = sums_of(r, chunk);
    if (r->tree) {
        size_t items = to.bytes / r->a.item_bytes, bytes = items * r->a.wide_bytes;
        for (size_t i = 0; i < r->tree->all; i++) {
            host_sum s = r->tree->sum[i];
            r->tree->from[i] = (s.host == hs->mine ? own : theirs_of(r, chunk, s.host)) +
                               s.place * bytes;
            r->tree->sorted[i] = s.node;
        }
        reduce_nodes(&r->tree->arithmetic, r->tree->sorted, r->tree->all, r->tree->total, to.data,
                     r->tree->from, items, ENDS);
        return UN_OK;
    }
    const void *by_host[UN_MAX_RANKS];
    for (int h = 0; h < hs->count; h++) {
        by_host[h] = h == hs->mine ? own : theirs_of(r, chunk, h);
        if (!r->wire || h == hs->mine) continue;
        float *sum = r->unpacked + (size_t)h * r->row_bytes / sizeof *sum;
        unpack_floats(r->wire, sum, by_host[h], to.bytes / r->a.item_bytes);
        by_host[h] = sum;
    }
    size_t items = to.bytes / r->a.item_bytes;
    r->a.second.run(r->a.narrow || r->wire ? own : to.data, by_host, hs->count,
                    wide_bytes_of(r, to.bytes) / r->a.second.unit, r->a.divisor);
    if (r->wire) /* a contribution counts for less in an average */
        pack_row(r, packed, own, (size_t)(to.data - r->out) / r->a.item_bytes, items,
                 (float)r->a.divisor);
    else if (r->a.narrow)
        convert(r->a.narrow, to.data, own, items);
    return UN_OK;
}

static un_status end_sum(lane_sum *r, un_status status) {
    for (int i = 0; i < DEPTH; i++) {
        end_batch(r->l, &r->scattered[i]);
        end_batch(r->l, &r->gathered[i]);
    }
    free_host_tree(r->tree);
    return status;
}

static un_status scatter_sums(lane_call *l, const row *given, row to) {
    int ranks = l->g->ranks;
    row rows[UN_MAX_RANKS];
    for (int rank = 0; rank < ranks; rank++)
        rows[rank] = (row){given[rank].data, l->x->several ? to.bytes : given[rank].bytes};
    lane_sum r = {.a = arithmetic_of(l->g, l->x->call)};
    size_t longest = longest_of(rows, ranks);
    size_t step = least(ROW_BYTES / r.a.item_bytes * r.a.item_bytes, longest);
    un_status status = prepare_sum(&r, l, step, (size_t)ranks * step);
    row slices[UN_MAX_RANKS];
    size_t chunks = longest ? (longest + step - 1) / step : 0;
    for (size_t time = 0; !status && time < chunks + AHEAD; time++) {
        slice_rows(rows, ranks, time * step, step, slices);
        if (time < chunks) status = begin_scatter(&r, time, slices);
        if (!status && time >= AHEAD)
            status = finish_scatter(&r, time - AHEAD, slice_of(to, (time - AHEAD) * step, step),
                                    NULL);
    }
    return end_sum(&r, status);
}

typedef struct shares { /* which rank combines what of a tensor */
    const hosts *hosts;
    size_t items, item_bytes, chunk_items;
    int lanes, owners; /* how many ranks of a host have a share; of how many hosts */
    int root;          /* -1: all hosts; else only its host */
} shares;

static shares shares_of(const lane_call *l, size_t items, size_t item_bytes, int root) {
    const hosts *hs = l->hosts;
    shares p = {
        .hosts = hs, .items = items, .item_bytes = item_bytes, .owners = hs->count, .root = root};
    p.lanes = hs->host[root < 0 ? 0 : hs->of[root].host].count;
    for (int h = 0; root < 0 && h < hs->count; h++)
        p.lanes = hs->host[h].count < p.lanes ? hs->host[h].count : p.lanes;
    if (root >= 0) p.owners = 1;
    p.chunk_items = least(items, (size_t)p.lanes * LANE_BYTES / item_bytes);
    return p;
}

/* The row of each rank in a chunk of `tensor`; it may be NULL. */
static void share_rows(const shares *p, size_t chunk, const char *tensor, row *rows) {
    size_t begin = chunk * p->chunk_items, items = least(p->chunk_items, p->items - begin);
    size_t count = (size_t)p->lanes * (size_t)p->owners;
    for (int h = 0; h < p->hosts->count; h++)
        for (int i = 0; i < p->hosts->host[h].count; i++) {
            bool has_one = i < p->lanes && (p->root < 0 || p->hosts->of[p->root].host == h);
            size_t share = (size_t)i * (size_t)p->owners + (size_t)(p->root < 0 ? h : 0);
            size_t first = has_one ? part_begin(items, count, share) : 0;
            size_t last = has_one ? part_begin(items, count, share + 1) : 0;
            char *data = tensor ? (char *)(uintptr_t)tensor + (begin + first) * p->item_bytes
                                : NULL;
            rows[p->hosts->host[h].ranks[i]] = (row){data, (last - first) * p->item_bytes};
        }
}

/* Of a reduce: the ranks of the root's host send it their shares. */
static un_status give_to_root(lane_call *l, const shares *p, row mine, const row *rows) {
    const hosts *hs = l->hosts;
    if (hs->of[p->root].host != hs->mine) return UN_OK;
    un_stream input, output[UN_MAX_RANKS];
    un_view view, views[UN_MAX_RANKS];
    input = stream_of(&mine, 1, &view);
    for (int i = 0; i < hs->host[hs->mine].count; i++)
        output[i] = stream_of(&rows[hs->host[hs->mine].ranks[i]], 1, &views[i]);
    return run_inside(l, UN_GATHER, hs->of[p->root].index, &input,
                      p->root == l->g->rank ? output : NULL);
}

static un_status reduce_in_lanes(lane_call *l, const char *in, char *out, size_t bytes, int root) {
    int me = l->g->rank;
    lane_sum r = {.a = arithmetic_of(l->g, l->x->call), .in = in, .out = out};
    shares p = shares_of(l, bytes / r.a.item_bytes, r.a.item_bytes, root);
    size_t owners = (size_t)p.lanes * (size_t)p.owners;
    size_t most = (p.chunk_items + owners - 1) / owners * p.item_bytes;
    char *result = root >= 0 ? scratch(l, 3, most) : NULL;
    un_status status = prepare_sum(&r, l, most, p.chunk_items * p.item_bytes);
    size_t chunks = p.items ? (p.items + p.chunk_items - 1) / p.chunk_items : 0;
    row rows[UN_MAX_RANKS], packed[UN_MAX_RANKS] = {0};
    for (size_t time = 0; !status && time < chunks + 2; time++) {
        if (time < chunks) {
            share_rows(&p, time, in, rows);
            status = begin_scatter(&r, time, rows);
        }
        if (!status && time >= 1 && time - 1 < chunks) {
            share_rows(&p, time - 1, out, rows);
            if (r.wire) find_packed(&r, time - 1, rows, packed);
            row mine = {root < 0 ? rows[me].data : result, rows[me].bytes};
            status = finish_scatter(&r, time - 1, mine, packed[me].data);
            if (!status && root < 0)
                begin_gather(l, r.wire ? packed : rows, &r.gathered[(time - 1) % DEPTH]);
            if (!status && root >= 0) status = give_to_root(l, &p, mine, rows);
        }
        if (!status && root < 0 && time >= 2) {
            share_rows(&p, time - 2, out, rows);
            if (r.wire) find_packed(&r, time - 2, rows, packed);
            status = finish_gather(l, r.wire ? packed : rows, &r.gathered[(time - 2) % DEPTH]);
            if (!status && r.wire) unpack_results(&r, packed, rows);
        }
    }
    return end_sum(&r, status);
}

/* -- pairs: gather, scatter, all_to_all --------------------------------------------------------------- */

/* What each rank sends to and receives from each, directly. */
static un_status move_pairs(lane_call *l, const row *gives, const row *takes) {
    un_group *g = l->g;
    const hosts *hs = l->hosts;
    const host *here = &hs->host[hs->mine];
    batch b = {0};
    for (int step = 1; step < g->ranks; step++) {
        int peer = (g->rank + step) % g->ranks;
        if (is_elsewhere(g, peer)) want(l, &b, peer, takes[peer].data, takes[peer].bytes);
    }
    for (int step = 1; step < g->ranks; step++) {
        int peer = (g->rank + step) % g->ranks;
        if (is_elsewhere(g, peer)) give(l, &b, peer, gives[peer].data, gives[peer].bytes);
    }
    un_stream input[UN_MAX_RANKS], output[UN_MAX_RANKS];
    un_view in_views[UN_MAX_RANKS], out_views[UN_MAX_RANKS];
    for (int i = 0; i < here->count; i++) {
        input[i] = stream_of(&gives[here->ranks[i]], 1, &in_views[i]);
        output[i] = stream_of(&takes[here->ranks[i]], 1, &out_views[i]);
    }
    un_status status = run_inside(l, UN_ALL_TO_ALL, 0, input, output);
    if (!status) status = land(l, &b);
    end_batch(l, &b);
    return status;
}

/* -- broadcast: from host to host, chunk by chunk -------------------------------------------------------- */

static un_status run_chain(lane_call *l, row whole, int root) {
    const hosts *hs = l->hosts;
    int first = hs->of[root].host, at = (hs->mine - first + hs->count) % hs->count;
    int before = (hs->mine + hs->count - 1) % hs->count, after = (hs->mine + 1) % hs->count;
    int entry = hs->of[root].index; /* the rank of each host that gets it first */
    bool mine = hs->index == entry % hs->host[hs->mine].count;
    size_t chunks = (whole.bytes + CHAIN_BYTES - 1) / CHAIN_BYTES;
    batch come = {0}, gone = {0};
    un_status status = UN_OK;
    for (size_t time = 0; !status && time < chunks + 1; time++) {
        row next = slice_of(whole, time * CHAIN_BYTES, CHAIN_BYTES);
        row now = slice_of(whole, (time ? time - 1 : 0) * CHAIN_BYTES, time ? CHAIN_BYTES : 0);
        if (mine && time) status = land(l, &come);
        if (mine && at && time < chunks)
            want(l, &come, hs->host[before].ranks[entry % hs->host[before].count], next.data,
                 next.bytes);
        if (status || !time) continue;
        if (mine && at + 1 < hs->count)
            give(l, &gone, hs->host[after].ranks[entry % hs->host[after].count], now.data,
                 now.bytes);
        un_view view;
        un_stream stream = stream_of(&now, 1, &view);
        status = run_inside(l, UN_BROADCAST, entry % hs->host[hs->mine].count, &stream, &stream);
    }
    if (!status) status = land(l, &gone);
    end_batch(l, &come);
    end_batch(l, &gone);
    return status;
}

/* -- the whole ------------------------------------------------------------------------------------------- */

/* Both sides, contiguous: where a tensor is not, a copy stands for it. */
typedef struct sides {
    row *rows; /* of input, then of output */
    char **copies;
    size_t inputs, outputs;
} sides;

static bool flatten(const un_stream *s, row *p, char **copied, bool reads) {
    char *direct = s->bytes ? stream_direct(s, 0, s->bytes) : NULL;
    *p = (row){direct, s->bytes};
    if (direct || !s->bytes) return true;
    if (!(p->data = *copied = malloc(s->bytes))) return false;
    if (reads) stream_read(p->data, s, 0, s->bytes);
    return true;
}

/* What this rank reads and writes. */
static void count_sides(const lane_call *l, sides *t) {
    un_operation o = l->x->call->operation;
    size_t ranks = (size_t)l->g->ranks;
    bool is_root = l->x->call->root == l->g->rank;
    bool reads = o == UN_SCATTER || o == UN_BROADCAST ? is_root : true;
    bool writes = o == UN_GATHER || o == UN_REDUCE ? is_root : o != UN_BROADCAST || !is_root;
    t->inputs = !reads ? 0 : un_is_wide_input(o) ? ranks : 1;
    t->outputs = !writes ? 0 : un_is_wide_output(o) ? ranks : 1;
}

static bool flatten_sides(lane_call *l, sides *t) {
    const un_call *call = l->x->call;
    count_sides(l, t);
    t->rows = calloc(t->inputs + t->outputs, sizeof *t->rows);
    t->copies = calloc(t->inputs + t->outputs, sizeof *t->copies);
    bool made = t->rows && t->copies;
    for (size_t i = 0; made && i < t->inputs; i++)
        made = flatten(&call->input[i], &t->rows[i], &t->copies[i], true);
    for (size_t i = 0; made && i < t->outputs; i++) {
        size_t at = t->inputs + i;
        made = flatten(&call->output[i], &t->rows[at], &t->copies[at], false);
    }
    return made;
}

static void write_back(const lane_call *l, const sides *t, un_status status) {
    for (size_t i = 0; !status && i < t->outputs; i++) {
        const un_stream *to = &l->x->call->output[i];
        if (t->copies[t->inputs + i])
            stream_write(to, 0, t->copies[t->inputs + i], to->bytes, false);
    }
}

/* In place, incoming data may overwrite what is still to be sent: then a copy is sent. */
static bool part_sides(sides *t) {
    for (size_t i = 0; i < t->inputs; i++)
        for (size_t o = 0; o < t->outputs; o++) {
            row *in = &t->rows[i], *out = &t->rows[t->inputs + o];
            bool apart = in->data + in->bytes <= out->data || out->data + out->bytes <= in->data;
            if (apart || !in->bytes || !out->bytes || t->copies[i]) continue;
            if (!(t->copies[i] = malloc(in->bytes))) return false;
            in->data = memcpy(t->copies[i], in->data, in->bytes);
        }
    return true;
}

static un_status move_sides(lane_call *l, sides *t) {
    const un_call *call = l->x->call;
    un_group *g = l->g;
    row *in = t->rows, *out = t->rows + t->inputs;
    l->given = in;
    row gives[UN_MAX_RANKS] = {0}, takes[UN_MAX_RANKS] = {0};
    switch (call->operation) {
    case UN_ALL_REDUCE:
    case UN_REDUCE:
        return reduce_in_lanes(l, in->data, t->outputs ? out->data : NULL, call->output->bytes,
                               call->operation == UN_REDUCE ? call->root : -1);
    case UN_BROADCAST: return run_chain(l, *t->rows, call->root);
    case UN_REDUCE_SCATTER: return scatter_sums(l, in, *out);
    case UN_GATHER:
        gives[call->root] = *in;
        memcpy(takes, out, t->outputs * sizeof *out);
        break;
    case UN_SCATTER:
        memcpy(gives, in, t->inputs * sizeof *in);
        takes[call->root] = *out;
        break;
    case UN_ALL_TO_ALL:
        if (!part_sides(t)) return UN_NO_MEMORY;
        memcpy(gives, in, t->inputs * sizeof *in);
        memcpy(takes, out, t->outputs * sizeof *out);
        break;
    default: /* all_gather */
        if (in->bytes && in->data != out[g->rank].data)
            memmove(out[g->rank].data, in->data, in->bytes);
        return gather_rows(l, out);
    }
    return move_pairs(l, gives, takes);
}

un_status run_lanes(execution *x) {
    un_group *g = x->g;
    lane_call l = {.x = x, .g = g, .hosts = hosts_of(g)};
    for (int rank = 0; rank < g->ranks; rank++)
        l.hosts->of[rank].given = l.hosts->of[rank].taken = 0;
    prepare_to_block(&x->patience);
    if (!x->patience.deadline_ns)
        x->patience.deadline_ns = clock_ns() + x->patience.call->timeout_ns;
    l.inner = (un_call){.dtype = x->call->dtype,
                        .factor = x->call->factor,
                        .pause = x->patience.call->pause,
                        .argument = x->patience.call->argument};
    sides t = {0};
    attend_network(true);
    un_status status = flatten_sides(&l, &t) ? move_sides(&l, &t) : UN_NO_MEMORY;
    attend_network(false);
    write_back(&l, &t, status);
    for (size_t i = 0; t.copies && i < t.inputs + t.outputs; i++) free(t.copies[i]);
    free(t.copies);
    free(t.rows);
    if (status && !status_from_abort(g)) fail(g, status, g->rank);
    return status;
}
