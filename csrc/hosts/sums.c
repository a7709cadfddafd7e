/* Large reductions over hosts.
 *
 * A sum is scattered: for each rank of another host, its mate combines the contributions of this
 * host and sends the result there; that rank combines the hosts' sums. all_reduce assigns every rank
 * a share of the tensor, and gathers the shares; of a reduce, only ranks of the root's host have
 * shares. So the j-th ranks of all hosts form a lane.
 */
#include <stdlib.h>

#include "base/packed.h"
#include "base/stream.h"
#include "hosts/lanes.h"

typedef struct sum {
    lane_call *l;
    host_arithmetic a;
    int root;                  /* of a reduce; else -1 */
    int lanes, owners;         /* so many ranks of so many hosts have shares; 0: all bring rows */
    const char *in, *out;      /* the tensors whose shares are reduced */
    row to;                    /* of rows: the result */
    size_t items, chunk_items; /* of the tensor or the longest row, and of a chunk of it */
    host_tree *tree;           /* of a reproducible sum; NULL: hosts have one sum each */
    char *wide, *taken;        /* rows in the type of sums; of a reproducible one: the host's */
    char *sums, *theirs;       /* of DEPTH chunks each */
    char *result;              /* our share of a reduce */
    un_wire wire;              /* of an all_reduce: how sums cross; then of DEPTH chunks, */
    char *sent, *results;      /* packed: the sums that we send; the result of each rank */
    float *unpacked;           /* a row from each host */
    size_t sum_bytes, row_bytes, packed_row, sent_rows; /* how many we send of a chunk */
} sum;

/* -- which rank combines what ------------------------------------------------------------------------ */

/* Where part `part` begins if `items` are divided into `parts`; the first ones get the remainder. */
static size_t part_begin(size_t items, size_t parts, size_t part) {
    size_t over = items % parts;
    return items / parts * part + (part < over ? part : over);
}

/* The share of a rank in a chunk of `tensor`, which may be NULL. */
static row share_of(const sum *s, int rank, size_t chunk, const char *tensor) {
    const rank_of_hosts *r = &s->l->hosts->of[rank];
    size_t begin = chunk * s->chunk_items, items = least(s->chunk_items, s->items - begin);
    size_t shares = (size_t)s->lanes * (size_t)s->owners;
    size_t share = (size_t)r->index * (size_t)s->owners + (size_t)(s->root < 0 ? r->host : 0);
    bool has_one = r->index < s->lanes && (s->root < 0 || s->l->hosts->of[s->root].host == r->host);
    size_t first = has_one ? part_begin(items, shares, share) : 0;
    size_t last = has_one ? part_begin(items, shares, share + 1) : 0;
    char *data = tensor ? (char *)(uintptr_t)tensor + (begin + first) * s->a.item_bytes : NULL;
    return (row){data, (last - first) * s->a.item_bytes};
}

/* The rows of a chunk: what is reduced for each rank; or, of the result, where it belongs. */
static void cut(const sum *s, size_t chunk, bool of_result, row *rows) {
    size_t step = s->chunk_items * s->a.item_bytes;
    for (int rank = 0; rank < s->l->g->ranks; rank++) {
        row given = s->lanes ? (row){0} : s->l->given[rank];
        if (s->l->x->several) given.bytes = s->to.bytes;
        rows[rank] = s->lanes ? share_of(s, rank, chunk, of_result ? s->out : s->in)
                              : slice_of(of_result ? s->to : given, chunk, step);
    }
}

static size_t items_of(const sum *s, row r) { return r.bytes / s->a.item_bytes; }

static size_t sums_by(const sum *s, int host) { return s->tree ? s->tree->count[host] : 1; }
static size_t sums_before(const sum *s, int host) {
    return s->tree ? s->tree->begin[host] : (size_t)host;
}

static char *sums_of(const sum *s, size_t chunk) { return s->sums + chunk % DEPTH * s->sum_bytes; }

static char *theirs_of(const sum *s, size_t chunk, int host) {
    size_t each = sums_before(s, s->l->hosts->count);
    return s->theirs + (chunk % DEPTH * each + sums_before(s, host)) * s->row_bytes;
}

/* What a host sends of a row of so many items. */
static size_t crossing_bytes(const sum *s, int host, size_t items) {
    return s->wire ? packed_bytes(s->wire, items) : items * s->a.wide_bytes * sums_by(s, host);
}

/* A row of a chunk has at most `most` items. */
static un_status prepare(sum *s, size_t most) {
    lane_call *l = s->l;
    size_t heard = 1, ranks = (size_t)l->g->ranks;
    for (int rank = 0; rank < l->g->ranks; rank++) heard += is_heard_here(l->g, rank);
    if (l->x->takes_tree && !(s->tree = make_host_tree(l->x))) return UN_NO_MEMORY;
    size_t own = s->tree ? s->tree->own : 1, bytes = s->chunk_items * s->a.wide_bytes;
    s->row_bytes = round_up(most * s->a.wide_bytes, LINE_BYTES);
    s->sum_bytes = heard * s->row_bytes * sums_by(s, l->hosts->mine);
    if (s->a.widen || s->tree) s->wide = scratch(l, 0, own * bytes * (s->lanes ? 1 : ranks));
    s->sums = scratch(l, 1, DEPTH * s->sum_bytes);
    s->theirs = scratch(l, 2, DEPTH * sums_before(s, l->hosts->count) * s->row_bytes);
    if (s->root >= 0) s->result = scratch(l, 3, most * s->a.item_bytes);
    if (s->tree) s->taken = scratch(l, 4, s->tree->here * heard * s->row_bytes);
    s->wire = un_wire_of(l->x->call->form);
    if (s->wire) {
        s->packed_row = round_up(packed_bytes(s->wire, most), LINE_BYTES);
        s->sent_rows = heard;
        s->sent = scratch(l, 5, DEPTH * heard * s->packed_row);
        s->results = scratch(l, 6, DEPTH * ranks * s->packed_row);
        s->unpacked = (float *)(void *)scratch(l, 7, (size_t)l->hosts->count * s->row_bytes);
    }
    l->inner.dtype = s->a.dtype;
    l->inner.reduction = s->a.inside;
    return status_from_abort(l->g) ? fail_from_abort(l->g) : UN_OK;
}

/* -- in few bits: inside a host, too, results stay packed until they are there ----------------------- */

static char *sent_of(const sum *s, size_t chunk, size_t row) {
    return s->sent + (chunk % DEPTH * s->sent_rows + row) * s->packed_row;
}

/* Where the results of all ranks cross from and to, whose rows in the tensor are `rows`. */
static const row *crossing_rows(const sum *s, size_t chunk, const row *rows, row *packed) {
    size_t ranks = (size_t)s->l->g->ranks;
    for (size_t rank = 0; s->wire && rank < ranks; rank++)
        packed[rank] = (row){s->results + (chunk % DEPTH * ranks + rank) * s->packed_row,
                             packed_bytes(s->wire, items_of(s, rows[rank]))};
    return s->wire ? packed : rows;
}

/* Pack `items` of a tensor from `first` on, and leave what that has lost. */
static void pack_row(sum *s, char *to, const char *data, size_t first, size_t items, float times) {
    float *residual = s->l->x->call->residual;
    const float *given = (const float *)(const void *)data;
    pack_floats(s->wire, to, given, items);
    if (residual) unpack_floats(s->wire, s->unpacked, to, items);
    for (size_t i = 0; residual && i < items; i++) {
        float lost = (given[i] - s->unpacked[i]) * times;
        residual[first + i] = lost - lost == 0 ? lost : 0; /* not of a NaN */
    }
}

/* All ranks unpack the same, and the one that has computed it, too. */
static void unpack_results(sum *s, const row *packed, const row *rows) {
    for (int rank = 0; rank < s->l->g->ranks; rank++) {
        size_t items = items_of(s, rows[rank]);
        float *to = s->a.narrow ? s->unpacked : (float *)(void *)rows[rank].data;
        if (items) unpack_floats(s->wire, to, packed[rank].data, items);
        if (items && s->a.narrow) convert(s->a.narrow, rows[rank].data, to, items);
    }
}

/* -- first: each rank combines the rows of its mates on other hosts inside its host, and sends them -- */

static un_status combine_inside(sum *s, const row *rows, char *sums) {
    const lane_call *l = s->l;
    char *wide = s->wide;
    streams input, output;
    no_streams(&input), no_streams(&output);
    for (int index = 0; index < l->here->count; index++)
        for (int i = l->begin[index]; i < l->begin[index + 1]; i++) {
            row part = rows[l->ranks[i]];
            size_t items = items_of(s, part);
            if (wide) {
                convert(s->a.widen, wide, part.data, items);
                part = (row){wide, items * s->a.wide_bytes};
                wide += part.bytes;
            }
            add_row(&input, index, part);
        }
    add_row(&output, 0, (row){sums, input.stream[l->hosts->index].bytes});
    return run_inside(s->l, UN_REDUCE_SCATTER, 0, input.stream, output.stream);
}

/* Our nodes of a row, one after the other. */
static size_t begin_nodes(sum *s, int rank, row given, char *to) {
    execution *x = s->l->x;
    size_t items = items_of(s, given), bytes = items * s->a.wide_bytes;
    const row *whole = &s->l->given[s->lanes ? 0 : rank];
    un_view view = {.data = whole->data, .bytes = whole->bytes};
    const un_stream part = {.views = &view, .count = 1, .bytes = view.bytes};
    for (size_t node = 0; items && node < s->tree->own; node++, to += bytes)
        if (x->several)
            reduce_contributions(x->several, &part, node,
                                 (size_t)(given.data - whole->data) / s->a.item_bytes, items, to,
                                 BEGINS);
        else
            reduce_nodes(&s->tree->arithmetic, NULL, 1, 1, to, (const void *[]){given.data}, items,
                         BEGINS);
    return s->tree->own * bytes;
}

/* The same of sums in a tree: a rank sends its nodes to each rank of its host, which reduces them to
 * the host's. */
static un_status combine_nodes(sum *s, const row *rows, char *sums) {
    const lane_call *l = s->l;
    const host_tree *tree = s->tree;
    int mine = l->hosts->index;
    streams input, output;
    no_streams(&input), no_streams(&output);
    char *at = s->wide, *taken[UN_MAX_RANKS], *next = s->taken;
    for (int index = 0; index < l->here->count; index++) {
        char *begin = at;
        for (int i = l->begin[index]; i < l->begin[index + 1]; i++)
            at += begin_nodes(s, l->ranks[i], rows[l->ranks[i]], at);
        add_row(&input, index, (row){begin, (size_t)(at - begin)});
    }
    size_t node_bytes = input.stream[mine].bytes / tree->own; /* of all rows that we reduce */
    for (int index = 0; index < l->here->count; index++) {
        row all = {taken[index] = next, tree->of_rank[index] * node_bytes};
        add_row(&output, index, all);
        next += all.bytes;
    }
    un_status status = run_inside(s->l, UN_ALL_TO_ALL, 0, input.stream, output.stream);
    for (int i = l->begin[mine]; !status && i < l->begin[mine + 1]; i++) {
        size_t items = items_of(s, rows[l->ranks[i]]), bytes = items * s->a.wide_bytes, used = 0;
        for (int index = 0; index < l->here->count; index++)
            for (size_t node = 0; node < tree->of_rank[index]; node++, taken[index] += bytes)
                tree->from[used++] = taken[index];
        for (size_t node = 0, begin = 0; node < sums_by(s, l->hosts->mine); sums += bytes) {
            size_t end = tree->end[node++];
            reduce_nodes(&tree->arithmetic, tree->nodes + begin, end - begin, tree->total, sums,
                         tree->from + begin, items, 0);
            begin = end;
        }
    }
    return status;
}

static un_status scatter(void *operation, size_t chunk) {
    sum *s = operation;
    lane_call *l = s->l;
    const hosts *hs = l->hosts;
    row rows[UN_MAX_RANKS];
    cut(s, chunk, false, rows);
    for (int h = 0; h < hs->count; h++) {
        size_t bytes = crossing_bytes(s, h, items_of(s, rows[l->g->rank]));
        if (h != hs->mine) want(l, rank_on(hs, h, hs->index), (row){theirs_of(s, chunk, h), bytes});
    }
    char *at = sums_of(s, chunk);
    un_status status = (s->tree ? combine_nodes : combine_inside)(s, rows, at);
    int first = l->begin[hs->index];
    for (int i = first; !status && i < l->begin[hs->index + 1]; i++) {
        row part = rows[l->ranks[i]];
        size_t items = items_of(s, part);
        row sent = {at, crossing_bytes(s, hs->mine, items)};
        if (i > first && s->wire)
            pack_row(s, sent.data = sent_of(s, chunk, (size_t)(i - first)), at,
                     (size_t)(part.data - s->in) / s->a.item_bytes, items, 1);
        if (i > first) give(l, l->ranks[i], sent);
        at += items * s->a.wide_bytes * sums_by(s, hs->mine);
    }
    return status;
}

/* -- then that rank combines the hosts' sums --------------------------------------------------------- */

static void finish_nodes(sum *s, size_t chunk, row to) {
    const host_tree *tree = s->tree;
    size_t items = items_of(s, to), bytes = items * s->a.wide_bytes;
    for (size_t i = 0; i < tree->all; i++) {
        host_sum each = tree->sum[i];
        char *sums = each.host == s->l->hosts->mine ? sums_of(s, chunk)
                                                    : theirs_of(s, chunk, each.host);
        tree->from[i] = sums + each.place * bytes;
        tree->sorted[i] = each.node;
    }
    reduce_nodes(&tree->arithmetic, tree->sorted, tree->all, tree->total, to.data, tree->from,
                 items, ENDS);
}

/* On a wire into `packed`. */
static void finish_sums(sum *s, size_t chunk, row to, char *packed) {
    const hosts *hs = s->l->hosts;
    const void *by_host[UN_MAX_RANKS];
    char *own = sums_of(s, chunk);
    size_t items = items_of(s, to);
    for (int h = 0; h < hs->count; h++) {
        by_host[h] = h == hs->mine ? own : theirs_of(s, chunk, h);
        if (!s->wire || h == hs->mine) continue;
        float *unpacked = s->unpacked + (size_t)h * s->row_bytes / sizeof *unpacked;
        unpack_floats(s->wire, unpacked, by_host[h], items);
        by_host[h] = unpacked;
    }
    s->a.second.run(s->a.narrow || s->wire ? own : to.data, by_host, hs->count,
                    items * s->a.wide_bytes / s->a.second.unit, s->a.divisor);
    if (s->wire) /* a contribution counts for less in an average */
        pack_row(s, packed, own, (size_t)(to.data - s->out) / s->a.item_bytes, items,
                 (float)s->a.divisor);
    else if (s->a.narrow)
        convert(s->a.narrow, to.data, own, items);
}

/* Of a reduce: the ranks of the root's host send it their shares. */
static un_status give_to_root(sum *s, row mine, const row *rows) {
    lane_call *l = s->l;
    const rank_of_hosts *root = &l->hosts->of[s->root];
    if (root->host != l->hosts->mine) return UN_OK;
    streams input, output;
    no_streams(&input), no_streams(&output);
    add_row(&input, 0, mine);
    for (int i = 0; i < l->here->count; i++) add_row(&output, i, rows[l->here->ranks[i]]);
    return run_inside(l, UN_GATHER, root->index, input.stream,
                      s->root == l->g->rank ? output.stream : NULL);
}

static un_status finish(void *operation, size_t chunk) {
    sum *s = operation;
    int me = s->l->g->rank;
    row rows[UN_MAX_RANKS], packed[UN_MAX_RANKS];
    cut(s, chunk, true, rows);
    const row *crossing = crossing_rows(s, chunk, rows, packed);
    row mine = {s->root < 0 ? rows[me].data : s->result, rows[me].bytes};
    if (mine.bytes && s->tree) finish_nodes(s, chunk, mine);
    if (mine.bytes && !s->tree) finish_sums(s, chunk, mine, crossing[me].data);
    if (s->root >= 0) return give_to_root(s, mine, rows);
    if (s->lanes) send_rows(s->l, crossing, 0, SIZE_MAX);
    return UN_OK;
}

/* -- all_reduce: the results are gathered -------------------------------------------------------------- */

static un_status share(void *operation, size_t chunk) {
    sum *s = operation;
    row rows[UN_MAX_RANKS], packed[UN_MAX_RANKS];
    cut(s, chunk, true, rows);
    un_status status = share_rows(s->l, crossing_rows(s, chunk, rows, packed), 0, SIZE_MAX);
    if (!status && s->wire) unpack_results(s, packed, rows);
    return status;
}

/* -- the whole ----------------------------------------------------------------------------------------- */

/* A row of a chunk has at most `most` items. */
static un_status run(sum *s, size_t most, size_t behind) {
    const lane_stage stages[] = {{scatter, 0}, {finish, behind}, {share, behind + 1}};
    un_status status = prepare(s, most);
    if (!status)
        status = run_pipeline(s->l, s, chunks_of(s->items, s->chunk_items), stages,
                              s->lanes && s->root < 0 ? 3 : 2);
    free(s->tree);
    return status;
}

un_status reduce_rows(lane_call *l, row to) {
    sum s = {.l = l, .a = arithmetic_of(l->g, l->x->call), .root = -1, .to = to};
    size_t longest = 0;
    for (int rank = 0; rank < l->g->ranks; rank++)
        longest = l->given[rank].bytes > longest ? l->given[rank].bytes : longest;
    s.items = (l->x->several ? to.bytes : longest) / s.a.item_bytes;
    s.chunk_items = least(ROW_BYTES / s.a.item_bytes, s.items);
    return run(&s, s.chunk_items, AHEAD);
}

un_status reduce_tensor(lane_call *l, const char *in, char *out, size_t bytes, int root) {
    const hosts *hs = l->hosts;
    sum s = {.l = l, .a = arithmetic_of(l->g, l->x->call), .root = root, .in = in, .out = out};
    s.owners = root < 0 ? hs->count : 1;
    s.lanes = hs->host[root < 0 ? 0 : hs->of[root].host].count;
    for (int h = 0; root < 0 && h < hs->count; h++)
        s.lanes = hs->host[h].count < s.lanes ? hs->host[h].count : s.lanes;
    s.items = bytes / s.a.item_bytes;
    s.chunk_items = least(s.items, (size_t)s.lanes * LANE_BYTES / s.a.item_bytes);
    size_t shares = (size_t)s.lanes * (size_t)s.owners;
    return run(&s, (s.chunk_items + shares - 1) / shares, 1);
}
