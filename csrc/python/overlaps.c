/* Arguments whose tensors share memory: what works in place, and what is refused.
 *
 * A result must have memory of its own. What a call reads may share memory as it likes; what it
 * writes may share memory with exactly one thing, the part of the input that it replaces.
 * The table is in docs/collectives.md. Tensors that lie apart, as nearly all do, cost a comparison
 * of where they begin and end.
 */
#include "binding.h"

#include <stdlib.h>

enum { FEW = 16 };

/* -- two tensors ----------------------------------------------------------------------------- */

/* The layout of any tensor: one that lies in one piece has a single dimension. */
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

/* Of two tensors whose extents overlap, whether they share an element. */
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

/* Whether an output replaces that part of the input which goes into it, or which was combined into
 * it, and nothing else. */
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

static const char *listed(const side *s, size_t tensor, char text[24]) {
    text[0] = 0;
    if (s->tensors > 1) PyOS_snprintf(text, 24, " %zu", tensor);
    return text;
}

static int refuse_outputs(const sides *s, size_t one, size_t other) {
    PyErr_Format(PyExc_ValueError,
                 s->in_place
                     ? "tensors %zu and %zu of the list share memory, and each would go into the "
                       "other: pass a tensor once, or clones"
                     : "outputs %zu and %zu share memory, and there is one result for each: pass "
                       "clones",
                 one < other ? one : other, one < other ? other : one);
    return -1;
}

static int refuse_pair(const sides *s, size_t output, size_t input) {
    char o[24], i[24];
    PyErr_Format(PyExc_ValueError,
                 "output%s and input%s share memory, and not as %s in place: pass a .clone() of "
                 "the input",
                 listed(s->out, output, o), listed(s->in, input, i),
                 s->wide_input && s->wide_output ? "the same part of both" : "this rank's own part");
    return -1;
}

static int check_pair(const void *argument, const extent *a, const extent *b) {
    const sides *s = argument;
    if (!a->written && !b->written) return 0;
    const side *written = s->in_place ? s->in : s->out;
    const tensor *one = &(a->written ? written : s->in)->tensor[a->tensor];
    const tensor *other = &(b->written ? written : s->in)->tensor[b->tensor];
    if (!share_memory(one, other)) return 0;
    if (a->written && b->written) return refuse_outputs(s, a->tensor, b->tensor);
    size_t output = a->written ? a->tensor : b->tensor;
    size_t input = a->written ? b->tensor : a->tensor;
    return is_in_place(s, output, input) ? 0 : refuse_pair(s, output, input);
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

/* Whether they lie in order, one behind the other: often they do as they come. */
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
            if (visit(argument, &extents[i], &extents[j])) return -1;
    return 0;
}

int check_overlaps(const sides *s) {
    size_t written = s->in_place ? s->in->tensors : s->out->tensors;
    size_t tensors = s->in->tensors + (s->in_place ? 0 : written);
    if (!written || tensors == 1) return 0;
    if (s->operation == UN_BROADCAST) return 0; /* written in order: the last one stays */
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

/* -- for Python: lists of several types, which the engine sees one type after the other -------- */

typedef struct search {
    const side *side;
    size_t written;
} search;

static int refuse_other_type(const void *argument, const extent *a, const extent *b) {
    const search *s = argument;
    size_t low = a->tensor < b->tensor ? a->tensor : b->tensor;
    size_t high = a->tensor < b->tensor ? b->tensor : a->tensor;
    const tensor *one = &s->side->tensor[low], *other = &s->side->tensor[high];
    if (low >= s->written || one->dtype == other->dtype || !share_memory(one, other)) return 0;
    const side outputs = {.tensors = s->written}, inputs = {.tensors = s->side->tensors - s->written};
    const sides both = {.in_place = !inputs.tensors, .in = &inputs, .out = &outputs};
    return high < s->written ? refuse_outputs(&both, low, high)
                             : refuse_pair(&both, low, high - s->written);
}

PyObject *module_check_types_apart(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *tensors;
    Py_ssize_t written;
    if (!PyArg_ParseTuple(arguments, "On", &tensors, &written)) return NULL;
    side s;
    start_side(&s);
    extent *extents = NULL;
    search search = {.side = &s, .written = (size_t)written};
    int failed = 0;
    if (read_list(&s, tensors))
        PyErr_Clear(); /* the call itself will complain */
    else if ((extents = malloc((s.tensors + 1) * sizeof *extents)))
        failed = walk_pairs(extents, list_extents(extents, &s, true), refuse_other_type, &search);
    free(extents);
    free_side(&s);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* -- for Python: the calls of other transports ------------------------------------------------- */

PyObject *module_check_overlaps(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *output, *input;
    int operation, rank, ranks, coalesced;
    if (!PyArg_ParseTuple(arguments, "iOOiip", &operation, &output, &input, &rank, &ranks, &coalesced))
        return NULL;
    sides both = {.operation = (un_operation)operation,
                  .rank = (size_t)rank,
                  .ranks = (size_t)ranks,
                  .wide_input = is_wide_input((un_operation)operation),
                  .wide_output = is_wide_output((un_operation)operation),
                  .coalesced = coalesced,
                  .in_place = input == Py_None};
    side in, out;
    start_side(&in);
    start_side(&out);
    both.in = &in;
    both.out = &out;
    size_t in_parts = both.wide_input ? both.ranks : 1, out_parts = both.wide_output ? both.ranks : 1;
    int failed = both.in_place ? read_list(&in, output)
                               : read_side(&in, input, in_parts, coalesced, false) ||
                                     read_side(&out, output, out_parts, coalesced, false);
    failed = failed || check_overlaps(&both);
    free_side(&in);
    free_side(&out);
    return failed ? NULL : Py_NewRef(Py_None);
}

PyObject *module_overlaps_itself(PyObject *module, PyObject *object) {
    (void)module;
    tensor t;
    un_view view;
    start_tensor(&t);
    bool failed = read_one(&t, &view, object, false);
    bool overlaps = !failed && t.layout && overlaps_itself(t.data, t.layout);
    free_tensor(&t);
    return failed ? NULL : PyBool_FromLong(overlaps);
}
