/* Arguments whose tensors share memory: what works in place, and what is refused.
 *
 * A result must have memory of its own. Inputs may overlap freely; an output may share memory only
 * with the part of the input that it replaces. The table is in docs/collectives.md. Tensors that do
 * not overlap, as in nearly all calls, cost one comparison of their ranges.
 */
#include "binding.h"

#include <stdlib.h>

enum { FEW = 16 };

/* -- two tensors ----------------------------------------------------------------------------- */

/* The layout of any tensor: a contiguous one has a single dimension. */
typedef union plain_layout {
    un_layout layout;
    char room[sizeof(un_layout) + sizeof(struct un_dim)];
} plain_layout;

static const un_layout *layout_of(const tensor *t, plain_layout *plain) {
    if (t->layout) return t->layout;
    plain->layout.dims = 1;
    plain->layout.item_bytes = t->item_bytes;
    plain->layout.dim[0] = (struct un_dim){t->bytes / t->item_bytes, (ptrdiff_t)t->item_bytes};
    return &plain->layout;
}

/* Whether two tensors whose extents overlap share an element. */
static bool share_memory(const tensor *a, const tensor *b) {
    if (!a->layout && !b->layout) return true;
    plain_layout plain_a, plain_b;
    return layouts_meet(a->data, layout_of(a, &plain_a), b->data, layout_of(b, &plain_b));
}

/* Where item `item` of a view lies, how many follow it in a row, and how far apart. */
static const char *locate(const un_view *view, size_t item, size_t item_bytes, size_t *left,
                          ptrdiff_t *stride) {
    if (!view->layout) {
        *left = view->bytes / item_bytes - item;
        *stride = (ptrdiff_t)item_bytes;
        return view->data + item * item_bytes;
    }
    const un_layout *layout = view->layout;
    const struct un_dim *inner = &layout->dim[layout->dims - 1];
    size_t index = view->first_byte / item_bytes + item;
    *left = inner->length - index % inner->length;
    *stride = inner->stride_bytes;
    const char *memory = view->data;
    for (int d = layout->dims - 1; d >= 0; d--) {
        memory += (ptrdiff_t)(index % layout->dim[d].length) * layout->dim[d].stride_bytes;
        index /= layout->dim[d].length;
    }
    return memory;
}

/* Whether every element of one view is the same element of the other. */
static bool are_the_same(const un_view *a, const un_view *b, size_t item_bytes) {
    if (a->bytes != b->bytes) return false;
    for (size_t item = 0; item < a->bytes / item_bytes;) {
        size_t left, other_left;
        ptrdiff_t stride, other_stride;
        if (locate(a, item, item_bytes, &left, &stride) !=
            locate(b, item, item_bytes, &other_left, &other_stride))
            return false;
        if (other_left < left) left = other_left;
        item += stride == other_stride ? left : 1;
    }
    return true;
}

/* -- both sides of a call -------------------------------------------------------------------- */

/* The view of a tensor in a part; NULL: none. */
static const un_view *view_in(const side *s, size_t tensor, size_t part, bool one_per_part) {
    if (!one_per_part) return &s->views[part * s->tensors + tensor];
    return tensor == part ? &s->views[part] : NULL;
}

/* Whether an output replaces exactly the part of the input that is copied or combined into it. */
static bool is_in_place(const sides *s, size_t output, size_t input) {
    bool gives_parts = !s->coalesced && s->in->tensors > 1;
    bool takes_parts = !s->coalesced && s->out->tensors > 1;
    bool found = false;
    if (s->coalesced && input != output) return false;
    for (size_t part = 0; part < s->ranks; part++) {
        if (!(s->wide_input && s->wide_output) && part != s->rank) continue;
        const un_view *given =
            view_in(s->in, input, s->wide_input ? part : 0, s->wide_input && gives_parts);
        const un_view *taken =
            view_in(s->out, output, s->wide_output ? part : 0, s->wide_output && takes_parts);
        if (!given || !taken) continue;
        if (!are_the_same(given, taken, s->in->tensor[input].item_bytes)) return false;
        found = true;
    }
    const tensor *read = &s->in->tensor[input];
    return found && !(read->layout && overlaps_itself(read->data, read->layout));
}

/* Report which two tensors clash: two outputs, or an output and an input. */
static int clash(const sides *s, bool both_written, size_t one, size_t other) {
    bool swap = both_written && other < one;
    if (s->clash) *s->clash = (struct clash){both_written, swap ? other : one, swap ? one : other};
    return REFUSED;
}

static int check_pair(const void *argument, const extent *a, const extent *b) {
    const sides *s = argument;
    if (!a->written && !b->written) return 0;
    const side *written = s->in_place ? s->in : s->out;
    const tensor *one = &(a->written ? written : s->in)->tensor[a->tensor];
    const tensor *other = &(b->written ? written : s->in)->tensor[b->tensor];
    if (!share_memory(one, other)) return 0;
    if (s->operation == UN_BROADCAST && one->dtype == other->dtype)
        return 0; /* written in order: the last one stays; but one type comes after another */
    if (a->written && b->written) return clash(s, true, a->tensor, b->tensor);
    size_t output = a->written ? a->tensor : b->tensor;
    size_t input = a->written ? b->tensor : a->tensor;
    return is_in_place(s, output, input) ? 0 : clash(s, false, output, input);
}

static int by_address(const void *a, const void *b) {
    const char *x = ((const extent *)a)->first, *y = ((const extent *)b)->first;
    return (x > y) - (x < y);
}

static void sort(extent *extents, size_t count) {
    if (count > FEW) {
        qsort(extents, count, sizeof *extents, by_address);
        return;
    }
    for (size_t i = 1; i < count; i++) {
        extent e = extents[i];
        size_t j = i;
        for (; j && extents[j - 1].first > e.first; j--) extents[j] = extents[j - 1];
        extents[j] = e;
    }
}

/* Whether they lie in order, one after the other: often they already do. */
static bool are_apart(const extent *extents, size_t count) {
    for (size_t i = 1; i < count; i++)
        if (extents[i].first < extents[i - 1].end) return false;
    return true;
}

static size_t list_extents(extent *to, const side *s, bool written) {
    size_t count = 0;
    for (size_t i = 0; i < s->tensors; i++) {
        const tensor *t = &s->tensor[i];
        if (!t->bytes) continue;
        to[count] = extent_of(t->data, t->layout, t->bytes);
        to[count].tensor = i;
        to[count++].written = written;
    }
    return count;
}

/* Sort the extents, and visit the pairs that overlap, until one visit fails. */
static int walk_pairs(extent *extents, size_t count,
                      int (*visit)(const void *, const extent *, const extent *),
                      const void *argument) {
    if (are_apart(extents, count)) return 0;
    sort(extents, count);
    if (are_apart(extents, count)) return 0;
    for (size_t i = 0; i < count; i++)
        for (size_t j = i + 1; j < count && extents[j].first < extents[i].end; j++)
            if (visit(argument, &extents[i], &extents[j])) return REFUSED;
    return 0;
}

int check_overlaps(const sides *s) {
    size_t written = s->in_place ? s->in->tensors : s->out->tensors;
    size_t tensors = s->in->tensors + (s->in_place ? 0 : written);
    if (!written || tensors == 1) return 0;
    if (s->operation == UN_BROADCAST && have_one_dtype(s->in)) return 0; /* see check_pair */
    extent few[FEW];
    extent *extents = tensors <= FEW ? few : malloc(tensors * sizeof *extents);
    if (!extents) {
        PyErr_NoMemory();
        return -1;
    }
    size_t count = list_extents(extents, s->in, s->in_place);
    if (!s->in_place) count += list_extents(extents + count, s->out, true);
    int failed = walk_pairs(extents, count, check_pair, s);
    if (extents != few) free(extents);
    return failed;
}

/* -- for Python: the calls of other transports, and why one of ours was refused ----------------- */

PyObject *module_find_clash(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *output, *input;
    int operation, rank, ranks, coalesced;
    if (!PyArg_ParseTuple(arguments, "iOOiip", &operation, &output, &input, &rank, &ranks, &coalesced))
        return NULL;
    struct clash found = {0};
    sides both = {.operation = (un_operation)operation,
                  .rank = (size_t)rank,
                  .ranks = (size_t)ranks,
                  .wide_input = un_is_wide_input((un_operation)operation),
                  .wide_output = un_is_wide_output((un_operation)operation),
                  .coalesced = coalesced,
                  .in_place = input == Py_None,
                  .clash = &found};
    side in, out;
    start_side(&in);
    start_side(&out);
    both.in = &in;
    both.out = &out;
    size_t in_parts = both.wide_input ? both.ranks : 1, out_parts = both.wide_output ? both.ranks : 1;
    bool is_read = both.in_place ? !read_list(&in, output)
                                 : !read_side(&in, input, in_parts, coalesced, false) &&
                                       !read_side(&out, output, out_parts, coalesced, false);
    bool clashes = is_read && check_overlaps(&both) == REFUSED;
    free_side(&in);
    free_side(&out);
    if (PyErr_Occurred()) return NULL;
    if (!is_read) return PyErr_Format(PyExc_ValueError, "these tensors cannot be compared");
    if (!clashes) Py_RETURN_NONE;
    return Py_BuildValue("Onn", found.both_written ? Py_True : Py_False, (Py_ssize_t)found.one,
                         (Py_ssize_t)found.other);
}

PyObject *module_overlaps_itself(PyObject *module, PyObject *object) {
    (void)module;
    tensor t;
    un_view view;
    start_tensor(&t);
    bool is_read = !read_one(&t, &view, object, false);
    bool overlaps = is_read && t.layout && overlaps_itself(t.data, t.layout);
    free_tensor(&t);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(overlaps);
}
