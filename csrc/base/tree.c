/* Reductions in a fixed tree: the same bits, whichever ranks bring the contributions.
 *
 * The contributions of a call are numbered 0, 1, 2 ... in rank order. Each node of the tree covers a
 * block of 2^k numbers that begins at a multiple of 2^k; its value is that of its first half,
 * combined with that of its second half if that has any contributions. So the tree depends on
 * how many contributions there are, and on nothing else. A rank reduces its own contributions to the
 * largest nodes that they cover, a host those of its ranks, and who owns the result the rest.
 */
#include <stdlib.h>
#include <string.h>

#include "base/tree.h"

enum {
    NODE_BYTES = 4096, /* of a partial result, in the nearest cache */
    DEPTH = 24,        /* nodes that wait for their second half: one for each level */
};

bool depends_on_order(un_dtype dtype) {
    unsigned code = dtype & 0xff;
    return code == UN_FLOAT || code == UN_BFLOAT || code == UN_COMPLEX;
}

tree_sum tree_sum_of(un_dtype dtype, un_reduction reduction, double factor, uint32_t total) {
    bool widens = is_half(dtype), averages = un_averages(reduction),
         scales = reduction == UN_PREMUL_SUM;
    un_dtype wide = widens ? un_dtype_of(UN_FLOAT, 32, 1) : dtype;
    tree_sum t = {.pair = find_reducer(wide, averages || scales ? UN_SUM : reduction),
                  .item_bytes = (dtype >> 8 & 0xff) / 8,
                  .wide_bytes = (wide >> 8 & 0xff) / 8,
                  .factor = factor,
                  .divisor = total};
    if (scales) t.scale = find_reducer(wide, UN_PREMUL_SUM).run;
    if (averages) t.divide = find_reducer(wide, (un_reduction)DIVISION).run;
    if (widens) {
        t.widen = find_reducer(dtype, (un_reduction)WIDENING).run;
        t.narrow = find_reducer(dtype, (un_reduction)NARROWING).run;
    }
    return t;
}

/* A node whose second half has no contributions is also the node above it. */
static tree_node grow(tree_node n, uint32_t total) {
    while (n.span < total && n.first + n.span >= total && !(n.first & (2 * n.span - 1)))
        n.span *= 2;
    return n;
}

static bool are_halves(tree_node a, tree_node b) {
    return a.span == b.span && a.first + a.span == b.first && !(a.first & (2 * a.span - 1));
}

static tree_node join(tree_node a, uint32_t total) {
    return grow((tree_node){a.first, 2 * a.span}, total);
}

size_t merge_nodes(const tree_node *nodes, size_t count, uint32_t total, tree_node *merged,
                   size_t *end) {
    size_t depth = 0;
    for (size_t i = 0; i < count; i++) {
        merged[depth++] = grow(nodes[i], total);
        for (; depth > 1 && are_halves(merged[depth - 2], merged[depth - 1]); depth--)
            merged[depth - 2] = join(merged[depth - 2], total);
        end[depth - 1] = i + 1;
    }
    return depth;
}

typedef struct partial { /* a node that waits for its second half */
    tree_node node;
    const char *data;
} partial;

static const char *begin_contribution(const tree_sum *t, char *room, const char *data,
                                      size_t items) {
    size_t units = items * t->wide_bytes / t->pair.unit;
    const void *source = data;
    if (t->widen) t->widen(room, &source, 1, items, 1), source = room;
    if (t->scale) t->scale(room, &source, 1, units, t->factor), source = room;
    return source;
}

static void end_result(const tree_sum *t, char *to, const char *data, char *room, size_t items) {
    size_t units = items * t->wide_bytes / t->pair.unit;
    char *last = t->narrow ? room : to;
    const void *source = data;
    if (t->divide) t->divide(last, &source, 1, units, t->divisor), source = last;
    if (t->narrow)
        t->narrow(to, &source, 1, items, 1);
    else if (source != to)
        memcpy(to, source, items * t->wide_bytes);
}

void reduce_nodes(const tree_sum *t, const tree_node *nodes, size_t count, uint32_t total, void *to,
                  const void *const *from, size_t items, int stages) {
    _Alignas(64) char rooms[DEPTH][NODE_BYTES];
    size_t from_bytes = stages & BEGINS ? t->item_bytes : t->wide_bytes;
    size_t to_bytes = stages & ENDS ? t->item_bytes : t->wide_bytes;
    size_t block = NODE_BYTES / t->wide_bytes;
    for (size_t done = 0; done < items; done += block) {
        size_t some = items - done < block ? items - done : block, depth = 0;
        size_t units = some * t->wide_bytes / t->pair.unit;
        char *out = (char *)to + done * to_bytes;
        partial waiting[DEPTH];
        for (size_t i = 0; i < count; i++) {
            const char *data = (const char *)from[i] + done * from_bytes;
            if (stages & BEGINS) data = begin_contribution(t, rooms[depth], data, some);
            tree_node node = nodes ? nodes[i] : (tree_node){(uint32_t)i, 1};
            waiting[depth++] = (partial){grow(node, total), data};
            for (; depth > 1; depth--) {
                partial *first = &waiting[depth - 2], *second = &waiting[depth - 1];
                if (!are_halves(first->node, second->node)) break;
                const void *halves[] = {first->data, second->data};
                bool is_last = i + 1 == count && depth == 2 && !(stages & ENDS && t->narrow);
                char *sum = is_last ? out : rooms[depth - 2];
                t->pair.run(sum, halves, 2, units, 1);
                *first = (partial){join(first->node, total), sum};
            }
        }
        if (stages & ENDS)
            end_result(t, out, waiting->data, rooms[0], some);
        else if (waiting->data != out)
            memcpy(out, waiting->data, some * t->wide_bytes);
    }
}

tree_table *make_tree_table(const uint32_t *counts, int ranks) {
    size_t size = (size_t)ranks, nodes = 0, used = 0, most = 1;
    uint32_t total = 0;
    for (size_t rank = 0; rank < size; rank++) {
        total += counts[rank];
        nodes += counts[rank] < 2 * DEPTH ? counts[rank] : 2 * DEPTH;
        most = counts[rank] > most ? counts[rank] : most;
    }
    tree_table *t = calloc(1, sizeof *t);
    tree_node *leaves = malloc(most * sizeof *leaves), *merged = malloc(most * sizeof *merged);
    size_t *end = malloc(most * sizeof *end);
    if (t) {
        *t = (tree_table){.total = total,
                          .first = calloc(size + 1, sizeof *t->first),
                          .begin = calloc(size + 1, sizeof *t->begin),
                          .node = malloc(nodes * sizeof *t->node)};
    }
    bool made = t && leaves && merged && end && t->first && t->begin && t->node;
    for (size_t rank = 0; made && rank < size; rank++) {
        for (uint32_t i = 0; i < counts[rank]; i++) leaves[i] = (tree_node){t->first[rank] + i, 1};
        size_t own = merge_nodes(leaves, counts[rank], total, merged, end);
        memcpy(t->node + used, merged, own * sizeof *merged);
        used += own;
        t->first[rank + 1] = t->first[rank] + counts[rank];
        t->begin[rank + 1] = used;
        if (own > t->most) t->most = own;
    }
    free(leaves);
    free(merged);
    free(end);
    if (made) return t;
    free_tree_table(t);
    return NULL;
}

void free_tree_table(tree_table *t) {
    if (!t) return;
    free(t->first);
    free(t->begin);
    free(t->node);
    free(t);
}
