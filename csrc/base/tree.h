/* Reductions in a fixed tree: the same bits, whichever ranks bring the contributions. */
#ifndef UNISONO_TREE_H
#define UNISONO_TREE_H

#include "base/kernels.h"

/* Contributions [first, first + span), as far as they exist: `span` is a power of two that divides
 * `first`. */
typedef struct tree_node {
    uint32_t first, span;
} tree_node;

#define MOST_CONTRIBUTIONS (1u << 20) /* to one call */

/* The arithmetic of a call: contributions are widened and scaled when they begin, and the result is
 * divided and rounded when it ends. */
typedef struct tree_sum {
    reducer pair;                            /* of two partial results */
    kernel *widen, *scale, *divide, *narrow; /* NULL: nothing to do */
    size_t item_bytes, wide_bytes;           /* of an element, and of one of a partial result */
    double factor, divisor;
} tree_sum;

/* Which nodes the ranks of a group bring: rank r those from begin[r] to begin[r + 1], from its
 * contributions first[r] to first[r + 1]. */
typedef struct tree_table {
    uint32_t total;
    size_t most; /* nodes of any rank */
    uint32_t *first;
    size_t *begin;
    tree_node *node;
} tree_table;

enum { BEGINS = 1, ENDS = 2 };

bool depends_on_order(un_dtype dtype);
tree_sum tree_sum_of(un_dtype dtype, un_reduction reduction, double factor, uint32_t total);

/* Merge nodes, which are sorted: returns how many `merged` there are, of which number i is made of
 * those from end[i - 1] to end[i]. */
size_t merge_nodes(const tree_node *nodes, size_t count, uint32_t total, tree_node *merged,
                   size_t *end);

/* Reduce what merges to one node; NULL: contributions 0, 1, 2 ..., all of them. The output may be
 * one of the inputs. */
void reduce_nodes(const tree_sum *t, const tree_node *nodes, size_t count, uint32_t total, void *to,
                  const void *const *from, size_t items, int stages);

/* The contributions of each rank as nodes; NULL: no memory. */
tree_table *make_tree_table(const uint32_t *counts, int ranks);
void free_tree_table(tree_table *table);

#endif
