/* Reductions to which ranks bring any number of contributions: see tree.c.
 *
 * How many, each rank publishes in its table of sizes; so all know the tree once they have met. Over
 * hosts lanes.c continues. On one host each rank reduces its contributions, piece by piece, to the
 * largest nodes that they cover: a row in its slot for each part of the tensor and node. Then each
 * rank reduces its share of the piece (all_reduce, reduce), or its own part (reduce_scatter).
 */
#include <stdlib.h>

#include "base/stream.h"
#include "local/call.h"

enum { SHARED_ITEMS = 16 }; /* a rank's share of a piece is a multiple of so many */

struct contributing {
    tree_table *table;
    tree_sum arithmetic;
    size_t parts, items; /* of the tensor; elements of a piece */
    size_t pitch;        /* of rows */
    size_t own;          /* how many contributions are ours */
    size_t *end;         /* of each of our nodes, among them */
    tree_node *leaves;   /* all of them */
    const void **from;   /* scratch: contributions of ours, or nodes of all ranks */
    char *copies;        /* of contributions that are not contiguous, a block of each */
};

/* -- our own contributions ----------------------------------------------------------------------- */

/* Point c->from at `bytes` of some of our contributions to a part; false: not all are contiguous. */
static bool find_contributions(contributing *c, const un_stream *part, size_t first, size_t last,
                               size_t offset, size_t bytes) {
    for (size_t i = first; i < last; i++)
        if (!(c->from[i - first] = stream_direct(part, i * (part->bytes / c->own) + offset, bytes)))
            return false;
    return true;
}

static void copy_contributions(contributing *c, const un_stream *part, size_t first, size_t last,
                               size_t offset, size_t bytes) {
    for (size_t i = first; i < last; i++) {
        char *copy = c->copies + (i - first) * BOUNCE_BYTES;
        stream_read(copy, part, i * (part->bytes / c->own) + offset, bytes);
        c->from[i - first] = copy;
    }
}

void reduce_contributions(contributing *c, const un_stream *part, size_t node, size_t item,
                          size_t items, char *to, int stages) {
    const tree_sum *t = &c->arithmetic;
    size_t first = node ? c->end[node - 1] : 0, last = c->end[node], offset = item * t->item_bytes;
    bool direct = find_contributions(c, part, first, last, offset, items * t->item_bytes);
    size_t block = direct ? items : BOUNCE_BYTES / t->item_bytes;
    for (size_t done = 0; done < items; done += block) {
        size_t some = items - done < block ? items - done : block;
        if (!direct)
            copy_contributions(c, part, first, last, offset + done * t->item_bytes,
                               some * t->item_bytes);
        reduce_nodes(t, c->leaves + first, last - first, c->table->total,
                     to + done * (stages & ENDS ? t->item_bytes : t->wide_bytes), c->from, some,
                     stages);
    }
}

/* -- stages: step 0 is the meeting, in which nothing moves ---------------------------------------- */

static size_t part_items(const execution *x) {
    return x->call->output->bytes / x->several->arithmetic.item_bytes;
}

static size_t piece_items(const execution *x, size_t step, size_t *first) {
    size_t items = part_items(x);
    *first = (step - 1) * x->several->items;
    return items - *first < x->several->items ? items - *first : x->several->items;
}

static char *row_of(const execution *x, int rank, size_t step, size_t part, size_t node) {
    const contributing *c = x->several;
    return slot_of(x->g, rank, x->number, step) + (part * c->table->most + node) * c->pitch;
}

static void bring_nodes(execution *x, size_t step) {
    contributing *c = x->several;
    size_t first, items = step ? piece_items(x, step, &first) : 0;
    size_t nodes = c->table->begin[me(x) + 1] - c->table->begin[me(x)];
    for (size_t part = 0; items && part < c->parts; part++)
        for (size_t node = 0; node < nodes; node++)
            reduce_contributions(c, &x->call->input[part], node, first, items,
                                 row_of(x, me(x), step, part, node), BEGINS);
}

/* Reduce all ranks' nodes, from element `item` of their rows on. */
static void reduce_rows(execution *x, size_t step, size_t part, size_t item, size_t items,
                        char *to) {
    contributing *c = x->several;
    const tree_table *table = c->table;
    for (int rank = 0; rank < x->g->ranks; rank++)
        for (size_t i = table->begin[rank]; i < table->begin[rank + 1]; i++)
            c->from[i] = row_of(x, rank, step, part, i - table->begin[rank]) +
                         item * c->arithmetic.wide_bytes;
    reduce_nodes(&c->arithmetic, table->node, table->begin[x->g->ranks], table->total, to, c->from,
                 items, ENDS);
}

static void write_result(execution *x, size_t item, const char *result, size_t items) {
    size_t bytes = x->several->arithmetic.item_bytes;
    stream_write(x->call->output, item * bytes, result, items * bytes, false);
}

/* The result takes the place of our own first node there, which no other rank needs. */
static void reduce_share(execution *x, size_t step) {
    size_t first, items = step ? piece_items(x, step, &first) : 0;
    span mine = share_of_rank(x, me(x), items, SHARED_ITEMS);
    if (!mine.bytes) return;
    char *to = row_of(x, me(x), step, 0, 0) + mine.offset * x->several->arithmetic.wide_bytes;
    reduce_rows(x, step, 0, mine.offset, mine.bytes, to);
}

static void take_shares(execution *x, size_t step) {
    const tree_sum *t = &x->several->arithmetic;
    bool takes = x->call->operation != UN_REDUCE || x->call->root == me(x);
    size_t first, items = step && takes ? piece_items(x, step, &first) : 0;
    for (int rank = 0; items && rank < x->g->ranks; rank++) {
        span share = share_of_rank(x, rank, items, SHARED_ITEMS);
        char *row = row_of(x, rank, step, 0, 0) + share.offset * t->wide_bytes;
        if (share.bytes) write_result(x, first + share.offset, row, share.bytes);
    }
}

static void take_part(execution *x, size_t step) {
    contributing *c = x->several;
    _Alignas(64) char made[BOUNCE_BYTES];
    size_t first, items = step ? piece_items(x, step, &first) : 0,
                  block = sizeof made / c->arithmetic.item_bytes;
    for (size_t done = 0; done < items; done += block) {
        size_t some = items - done < block ? items - done : block;
        reduce_rows(x, step, (size_t)me(x), done, some, made);
        write_result(x, first + done, made, some);
    }
}

/* A group of one. */
static void reduce_alone(execution *x) {
    contributing *c = x->several;
    _Alignas(64) char made[BOUNCE_BYTES];
    size_t items = part_items(x), block = sizeof made / c->arithmetic.item_bytes;
    for (size_t done = 0; done < items; done += block) {
        size_t some = items - done < block ? items - done : block;
        reduce_contributions(c, x->call->input, 0, done, some, made, BEGINS | ENDS);
        write_result(x, done, made, some);
    }
}

/* -- the whole ------------------------------------------------------------------------------------- */

static bool know_all_counts(execution *x) { return x->call->contributions > 0; }

void plan_contributions(execution *x) {
    const un_call *call = x->call;
    uint64_t *sizes = sizes_of(x->g, me(x), x->number);
    memset(sizes, 0, 2 * (size_t)x->g->ranks * sizeof *sizes);
    sizes[0] = call->contributions;
    x->pairs_agree = know_all_counts;
    x->bytes = call->output->bytes *
               (call->operation == UN_REDUCE_SCATTER ? (size_t)x->g->ranks : 1);
    x->bring = do_nothing;
    x->needs_slice = !x->g->reach && x->g->ranks > 1;
}

static contributing *count_contributions(execution *x) {
    un_group *g = x->g;
    uint32_t counts[UN_MAX_RANKS];
    for (int rank = 0; rank < g->ranks; rank++)
        counts[rank] = (uint32_t)sizes_of(g, rank, x->number)[0];
    contributing *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    x->several = c;
    c->own = x->call->contributions;
    if (!(c->table = make_tree_table(counts, g->ranks))) return NULL;
    tree_table *table = c->table;
    c->arithmetic = tree_sum_of(x->call->dtype, x->call->reduction, x->call->factor, table->total);
    size_t most = table->begin[g->ranks] > c->own ? table->begin[g->ranks] : c->own;
    c->end = malloc(c->own * sizeof *c->end);
    c->leaves = malloc(c->own * sizeof *c->leaves);
    c->from = malloc(most * sizeof *c->from);
    c->copies = malloc(c->own * BOUNCE_BYTES);
    tree_node *merged = malloc(c->own * sizeof *merged);
    bool made = c->end && c->leaves && c->from && c->copies && merged;
    for (uint32_t i = 0; made && i < c->own; i++)
        c->leaves[i] = (tree_node){table->first[g->rank] + i, 1};
    if (made) merge_nodes(c->leaves, c->own, table->total, merged, c->end);
    free(merged);
    return made ? c : NULL;
}

static un_status move_pieces(execution *x) {
    contributing *c = x->several;
    bool scatters = x->call->operation == UN_REDUCE_SCATTER;
    c->parts = scatters ? (size_t)x->g->ranks : 1;
    size_t row = SLOT_BYTES / c->parts / c->table->most;
    c->pitch = (row < CUT_STEP_BYTES ? row : CUT_STEP_BYTES) / 16 * 16;
    if (!c->pitch) return fail(x->g, UN_NO_MEMORY, me(x));
    c->items = c->pitch / c->arithmetic.wide_bytes;
    x->steps = 1 + (part_items(x) + c->items - 1) / c->items;
    x->bring = bring_nodes;
    x->combine = scatters ? NULL : reduce_share;
    x->take = scatters ? take_part : take_shares;
    return move(x);
}

tree_table *tree_of(execution *x) { return x->several->table; }

un_status run_contributions(execution *x) {
    un_status status = count_contributions(x) ? UN_OK : fail(x->g, UN_NO_MEMORY, me(x));
    if (!status && x->g->reach)
        status = x->g->reach->run(x);
    else if (!status && x->g->ranks > 1)
        status = move_pieces(x);
    else if (!status)
        reduce_alone(x);
    contributing *c = x->several;
    if (!c) return status;
    free_tree_table(c->table);
    free(c->end);
    free(c->leaves);
    free(c->from);
    free(c->copies);
    free(c);
    return status;
}
