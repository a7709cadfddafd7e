/* Where the elements of a tensor lie, and whether they overlap those of another. */
#include "layouts.h"

#include <stdlib.h>
#include <string.h>

/* The memory of a tensor, in whatever order: strides above 0, the shortest first. Elements that
 * touch each other are one. */
typedef struct lattice {
    extent range;
    size_t item_bytes;
    int dims;
    struct un_dim dim[64];
} lattice;

extent extent_of(const char *data, const un_layout *layout, size_t bytes) {
    extent e = {.first = data, .end = data};
    if (layout)
        for (int d = 0; d < layout->dims; d++) {
            ptrdiff_t reach = (ptrdiff_t)(layout->dim[d].length - 1) * layout->dim[d].stride_bytes;
            *(reach < 0 ? &e.first : &e.end) += reach;
        }
    e.end += layout ? layout->item_bytes : bytes;
    return e;
}

static void read_lattice(lattice *l, const char *data, const un_layout *layout, size_t bytes) {
    l->range = extent_of(data, layout, bytes);
    l->item_bytes = layout ? layout->item_bytes : bytes;
    l->dims = 0;
    for (int d = 0; layout && d < layout->dims; d++) {
        struct un_dim dim = layout->dim[d];
        if (!dim.stride_bytes) continue;
        if (dim.stride_bytes < 0) dim.stride_bytes = -dim.stride_bytes;
        int at = l->dims++;
        for (; at && l->dim[at - 1].stride_bytes > dim.stride_bytes; at--)
            l->dim[at] = l->dim[at - 1];
        l->dim[at] = dim;
    }
    int touching = 0;
    while (touching < l->dims && l->dim[touching].stride_bytes == (ptrdiff_t)l->item_bytes)
        l->item_bytes *= l->dim[touching++].length;
    l->dims -= touching;
    memmove(l->dim, l->dim + touching, (size_t)l->dims * sizeof *l->dim);
}

static size_t common_divisor(size_t a, size_t b) {
    while (b) {
        size_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* What all strides are multiples of; 0: there are none. */
static size_t period_of(const lattice *l) {
    size_t period = 0;
    for (int d = 0; d < l->dims; d++)
        period = common_divisor(period, (size_t)l->dim[d].stride_bytes);
    return period;
}

/* A map of the bytes of a range, a bit for each `unit`. */
typedef struct map {
    uint64_t *bits;
    extent range;
    size_t unit;
} map;

typedef enum purpose { MARK, FIND_TWINS, FIND_MARKED } purpose;

/* Mark an element, or check whether it is marked. True: a search has found what it looks for. */
static bool visit(const map *m, const char *element, size_t item_bytes, purpose purpose) {
    bool marked = false;
    for (const char *byte = element; byte < element + item_bytes; byte += m->unit) {
        if (byte < m->range.first || byte >= m->range.end) continue;
        size_t index = (size_t)(byte - m->range.first) / m->unit;
        uint64_t bit = (uint64_t)1 << index % 64;
        marked = marked || (m->bits[index / 64] & bit);
        if (purpose != FIND_MARKED) m->bits[index / 64] |= bit;
    }
    return marked && purpose != MARK;
}

static bool visit_all(const map *m, const char *from, const lattice *l, int dims, purpose purpose) {
    if (!dims) return visit(m, from, l->item_bytes, purpose);
    const struct un_dim *dim = &l->dim[dims - 1];
    for (size_t i = 0; i < dim->length; i++)
        if (visit_all(m, from + (ptrdiff_t)i * dim->stride_bytes, l, dims - 1, purpose))
            return true;
    return false;
}

/* Whether elements of a and b, or of a alone, overlap, checked element by element. True if there
 * is no memory for the check. */
static bool meet_exactly(const lattice *a, const lattice *b) {
    map m = {.range = a->range, .unit = common_divisor(a->item_bytes, period_of(a))};
    if (b) {
        m.unit = common_divisor(common_divisor(m.unit, b->item_bytes), period_of(b));
        m.unit = common_divisor(m.unit, (size_t)(b->range.first - a->range.first));
        m.range.first = b->range.first; /* not before a's */
        if (b->range.end < m.range.end) m.range.end = b->range.end;
    }
    m.bits = calloc((size_t)(m.range.end - m.range.first) / m.unit / 64 + 1, sizeof *m.bits);
    if (!m.bits) return true;
    bool met = visit_all(&m, a->range.first, a, a->dims, b ? MARK : FIND_TWINS);
    if (b) met = visit_all(&m, b->range.first, b, b->dims, FIND_MARKED);
    free(m.bits);
    return met;
}

/* Dimensions that nest like the units of a clock never overlap. */
bool overlaps_itself(const char *data, const un_layout *layout) {
    lattice l;
    for (int d = 0; d < layout->dims; d++)
        if (!layout->dim[d].stride_bytes) return true;
    read_lattice(&l, data, layout, 0);
    size_t reach = l.item_bytes;
    for (int d = 0; d < l.dims; d++) {
        if ((size_t)l.dim[d].stride_bytes < reach) return meet_exactly(&l, NULL);
        reach += (l.dim[d].length - 1) * (size_t)l.dim[d].stride_bytes;
    }
    return false;
}

/* Tensors whose strides have a common period never meet if the places of their elements in it do
 * not. */
bool tensors_meet(const char *a, const un_layout *a_layout, size_t a_bytes, const char *b,
                  const un_layout *b_layout, size_t b_bytes) {
    lattice one, other, *low = &one, *high = &other;
    read_lattice(&one, a, a_layout, a_bytes);
    read_lattice(&other, b, b_layout, b_bytes);
    if (one.range.first > other.range.first) low = &other, high = &one;
    if (high->range.first >= low->range.end) return false;
    size_t period = common_divisor(period_of(low), period_of(high));
    if (!period) return true;
    size_t place = (size_t)(high->range.first - low->range.first) % period;
    if (low->item_bytes <= place && place + high->item_bytes <= period) return false;
    return meet_exactly(low, high);
}
