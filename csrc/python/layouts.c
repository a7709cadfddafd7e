/* Where the elements of a tensor lie, and whether they overlap those of another. */
#include "layouts.h"

#include <stdlib.h>

static size_t length_of(ptrdiff_t stride) { return (size_t)(stride < 0 ? -stride : stride); }

/* Whether dimensions nest like the units of a clock: then no two elements overlap. If not, they
 * may or may not. Sorts them. */
static bool are_nested(struct un_dim *dim, int dims, size_t item_bytes) {
    for (int i = 1; i < dims; i++)
        for (int j = i; j && dim[j].stride_bytes < dim[j - 1].stride_bytes; j--) {
            struct un_dim larger = dim[j - 1];
            dim[j - 1] = dim[j];
            dim[j] = larger;
        }
    size_t reach = item_bytes;
    for (int d = 0; d < dims; d++) {
        if ((size_t)dim[d].stride_bytes < reach) return false;
        reach += (dim[d].length - 1) * (size_t)dim[d].stride_bytes;
    }
    return true;
}

extent extent_of(const char *data, const un_layout *layout, size_t bytes) {
    extent e = {.first = data, .end = data};
    if (layout)
        for (int d = 0; d < layout->dims; d++) {
            ptrdiff_t reach =
                (ptrdiff_t)(layout->dim[d].length - 1) * layout->dim[d].stride_bytes;
            *(reach < 0 ? &e.first : &e.end) += reach;
        }
    e.end += layout ? layout->item_bytes : bytes;
    return e;
}

static size_t common_divisor(size_t a, size_t b) {
    while (b) {
        size_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* A map of the bytes from `first` on, a bit for each `unit`. */
typedef struct map {
    uint64_t *bits;
    const char *first, *end;
    size_t unit;
} map;

typedef enum purpose { MARK, FIND_TWINS, FIND_MARKED } purpose;

/* Mark an element, or check whether it is marked. True: a search has found what it looks for. */
static bool visit(const map *m, const char *element, size_t item_bytes, purpose purpose) {
    bool marked = false;
    for (const char *byte = element; byte < element + item_bytes; byte += m->unit) {
        if (byte < m->first || byte >= m->end) continue;
        size_t index = (size_t)(byte - m->first) / m->unit;
        uint64_t bit = (uint64_t)1 << index % 64;
        marked = marked || (m->bits[index / 64] & bit);
        if (purpose != FIND_MARKED) m->bits[index / 64] |= bit;
    }
    return marked && purpose != MARK;
}

static bool visit_all(const map *m, const char *data, const un_layout *layout, int from_dim,
                      purpose purpose) {
    if (from_dim == layout->dims) return visit(m, data, layout->item_bytes, purpose);
    const struct un_dim *dim = &layout->dim[from_dim];
    for (size_t i = 0; i < dim->length; i++)
        if (visit_all(m, data + (ptrdiff_t)i * dim->stride_bytes, layout, from_dim + 1, purpose))
            return true;
    return false;
}

static size_t unit_of(const un_layout *layout) {
    size_t unit = layout->item_bytes;
    for (int d = 0; d < layout->dims; d++)
        unit = common_divisor(unit, length_of(layout->dim[d].stride_bytes));
    return unit;
}

/* Whether elements of a and b, or of a alone, overlap, checked element by element. True if there
 * is no memory for the check. */
static bool meet_exactly(const char *a, const un_layout *a_layout, const char *b,
                         const un_layout *b_layout) {
    extent range = extent_of(a, a_layout, 0);
    size_t unit = unit_of(a_layout);
    if (b) {
        extent other = extent_of(b, b_layout, 0);
        unit = common_divisor(common_divisor(unit, unit_of(b_layout)),
                              length_of(other.first - range.first));
        if (other.first > range.first) range.first = other.first;
        if (other.end < range.end) range.end = other.end;
    }
    map m = {.first = range.first, .end = range.end, .unit = unit};
    m.bits = calloc((size_t)(range.end - range.first) / unit / 64 + 1, sizeof *m.bits);
    if (!m.bits) return true;
    bool met = visit_all(&m, a, a_layout, 0, b ? MARK : FIND_TWINS);
    if (b) met = visit_all(&m, b, b_layout, 0, FIND_MARKED);
    free(m.bits);
    return met;
}

static int positive_dims(struct un_dim *to, const un_layout *layout) {
    for (int d = 0; d < layout->dims; d++)
        to[d] = (struct un_dim){layout->dim[d].length,
                                (ptrdiff_t)length_of(layout->dim[d].stride_bytes)};
    return layout->dims;
}

bool overlaps_itself(const char *data, const un_layout *layout) {
    struct un_dim dim[64];
    if (are_nested(dim, positive_dims(dim, layout), layout->item_bytes)) return false;
    for (int d = 0; d < layout->dims; d++)
        if (!dim[d].stride_bytes) return true;
    return meet_exactly(data, layout, NULL, NULL);
}

/* Whether two tensors interleave without overlap: treat both as one tensor, with the distance
 * between them as a further dimension. */
static bool interleave(const un_layout *a, const un_layout *b, size_t distance) {
    struct un_dim dim[64 + 64 + 1], other[64];
    int dims = positive_dims(dim, a), others = positive_dims(other, b), own = dims;
    bool paired[64] = {false}; /* each of a's with one of b's, which may have a stride twice */
    for (int i = 0; i < others; i++) {
        int d = 0;
        while (d < own && (paired[d] || dim[d].stride_bytes != other[i].stride_bytes)) d++;
        if (d == own) {
            dim[dims++] = other[i];
            continue;
        }
        paired[d] = true;
        if (other[i].length > dim[d].length) dim[d].length = other[i].length;
    }
    dim[dims++] = (struct un_dim){2, (ptrdiff_t)distance};
    return are_nested(dim, dims, a->item_bytes > b->item_bytes ? a->item_bytes : b->item_bytes);
}

bool layouts_meet(const char *a, const un_layout *a_layout, const char *b,
                  const un_layout *b_layout) {
    ptrdiff_t distance = extent_of(b, b_layout, 0).first - extent_of(a, a_layout, 0).first;
    if (distance && interleave(a_layout, b_layout, length_of(distance))) return false;
    return meet_exactly(a, a_layout, b, b_layout);
}
