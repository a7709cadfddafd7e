/* Arithmetic in the order of hosts: the ranks of each host in their order, then the hosts in theirs.
 *
 * So for one placement of ranks every element is combined in one order, at every size, by any rank.
 * Sums of half types travel between hosts in float32, and are rounded once at the end. Reproducible
 * sums know no hosts: each host sends the nodes of their tree that its ranks have whole.
 */
#include <stdlib.h>

#include "hosts/hosts.h"

enum { STACK_BYTES = 64 * 1024 };

host_arithmetic arithmetic_of(const un_group *g, const un_call *call) {
    bool widens = is_half(call->dtype);
    bool averages = un_averages(call->reduction);
    host_arithmetic a = {.dtype = widens ? un_dtype_of(UN_FLOAT, 32, 1) : call->dtype,
                         .item_bytes = (call->dtype >> 8 & 0xff) / 8,
                         .inside = averages ? UN_SUM : call->reduction,
                         .factor = call->factor,
                         .divisor = averages ? g->ranks : 1};
    un_reduction between = averages                           ? (un_reduction)DIVISION
                           : call->reduction == UN_PREMUL_SUM ? UN_SUM
                                                              : call->reduction;
    a.wide_bytes = widens ? sizeof(float) : a.item_bytes;
    a.first = find_reducer(a.dtype, a.inside);
    a.second = find_reducer(a.dtype, between);
    if (widens) {
        a.widen = find_reducer(call->dtype, (un_reduction)WIDENING).run;
        a.narrow = find_reducer(call->dtype, (un_reduction)NARROWING).run;
    }
    return a;
}

void convert(kernel *how, void *to, const void *from, size_t items) { how(to, &from, 1, items, 1); }

/* The contributions lie at `sources`, by rank. */
void combine_in_host_order(execution *x, char *to, const void **sources, size_t bytes) {
    const hosts *hs = hosts_of(x->g);
    host_arithmetic a = arithmetic_of(x->g, x->call);
    _Alignas(64) char memory[STACK_BYTES];
    size_t rows = (size_t)(hs->most + hs->count) + (a.narrow != NULL);
    size_t pitch = STACK_BYTES / rows / 16 * 16, items = bytes / a.item_bytes;
    size_t block = pitch / a.wide_bytes;
    for (size_t done = 0; done < items; done += block) {
        size_t some = items - done < block ? items - done : block;
        size_t units = some * a.wide_bytes / a.first.unit;
        const void *partials[UN_MAX_RANKS], *theirs[UN_MAX_RANKS];
        for (int h = 0; h < hs->count; h++) {
            for (int i = 0; i < hs->host[h].count; i++) {
                theirs[i] = (const char *)sources[hs->host[h].ranks[i]] + done * a.item_bytes;
                char *wide = memory + (size_t)i * pitch;
                if (a.widen) convert(a.widen, wide, theirs[i], some), theirs[i] = wide;
            }
            char *partial = memory + (size_t)(hs->most + h) * pitch;
            a.first.run(partial, theirs, hs->host[h].count, units, a.factor);
            partials[h] = partial;
        }
        char *out = to + done * a.item_bytes;
        char *sum = a.narrow ? memory + (rows - 1) * pitch : out;
        a.second.run(sum, partials, hs->count, some * a.wide_bytes / a.second.unit, a.divisor);
        if (a.narrow) convert(a.narrow, out, sum, some);
    }
}

/* -- sums in a tree -------------------------------------------------------------------------------- */

static int by_contributions(const void *a, const void *b) {
    uint32_t one = ((const host_sum *)a)->node.first, other = ((const host_sum *)b)->node.first;
    return one < other ? -1 : one > other;
}

static void find_sums(host_tree *t, const hosts *hs, const tree_table *table, tree_node *merged,
                      size_t *others) {
    for (int h = 0; h < hs->count; h++) {
        size_t nodes = 0;
        for (int i = 0; i < hs->host[h].count; i++) {
            int rank = hs->host[h].ranks[i];
            size_t begin = table->begin[rank], count = table->begin[rank + 1] - begin;
            memcpy(t->sorted + nodes, table->node + begin, count * sizeof *t->sorted);
            nodes += count;
            if (h == hs->mine) t->of_rank[i] = count;
        }
        size_t *end = h == hs->mine ? t->end : others;
        t->count[h] = merge_nodes(t->sorted, nodes, table->total, merged, end);
        for (size_t i = 0; i < t->count[h]; i++) t->sum[t->all++] = (host_sum){merged[i], h, i};
        t->begin[h + 1] = t->all;
        if (h != hs->mine) continue;
        t->here = nodes;
        t->own = t->of_rank[hs->index];
        memcpy(t->nodes, t->sorted, nodes * sizeof *t->nodes);
    }
    qsort(t->sum, t->all, sizeof *t->sum, by_contributions);
}

host_tree *make_host_tree(execution *x) {
    const hosts *hs = hosts_of(x->g);
    uint32_t ones[UN_MAX_RANKS];
    for (int rank = 0; rank < x->g->ranks; rank++) ones[rank] = 1;
    tree_table *table = x->several ? tree_of(x) : make_tree_table(ones, x->g->ranks);
    if (!table) return NULL;
    size_t nodes = table->begin[x->g->ranks], hosts = (size_t)hs->count, most = (size_t)hs->most;
    size_t of_node = 3 * sizeof(tree_node) + 2 * sizeof(size_t) + sizeof(host_sum) + sizeof(void *);
    host_tree *t = calloc(1, sizeof *t + (most + 2 * hosts + 1) * sizeof(size_t) + nodes * of_node);
    if (t) { /* its arrays follow it */
        t->total = table->total;
        t->arithmetic = tree_sum_of(x->call->dtype, x->call->reduction, x->call->factor, t->total);
        t->of_rank = (size_t *)(t + 1);
        t->count = t->of_rank + most;
        t->begin = t->count + hosts;
        t->end = t->begin + hosts + 1;
        size_t *others = t->end + nodes;
        t->sum = (host_sum *)(others + nodes);
        t->from = (const void **)(t->sum + nodes);
        t->nodes = (tree_node *)(t->from + nodes);
        t->sorted = t->nodes + nodes;
        find_sums(t, hs, table, t->sorted + nodes, others);
    }
    if (!x->several) free_tree_table(table);
    return t;
}
