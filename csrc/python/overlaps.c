/* Arguments whose tensors share memory: what works in place, and what is refused.
 *
 * A result must have memory of its own. Inputs may overlap freely; an output may share memory only
 * with the part of the input that it replaces. The table is in docs/collectives.md. Tensors that do
 * not overlap, as in nearly all calls, cost one comparison of their ranges.
 */
#include "binding.h"

#include <stdlib.h>

enum { FEW = 16 };

static const char *address_of(const un_view *view, size_t byte) {
    if (!view->layout) return view->data + byte;
    const char *address = view->data;
    size_t index = (view->first_byte + byte) / view->layout->item_bytes;
    for (int d = view->layout->dims - 1; d >= 0; d--) {
        const struct un_dim *dim = &view->layout->dim[d];
        address += (ptrdiff_t)(index % dim->length) * dim->stride_bytes;
        index /= dim->length;
    }
    return address;
}

/* Whether every element of one view is the same element of the other. */
static bool are_the_same(const un_view *a, const un_view *b) {
    size_t step = a->layout ? a->layout->item_bytes : a->bytes;
    if (b->layout && b->layout->item_bytes < step) step = b->layout->item_bytes;
    if (a->bytes != b->bytes) return false;
    for (size_t byte = 0; byte < a->bytes; byte += step)
        if (address_of(a, byte) != address_of(b, byte)) return false;
    return true;
}

/* The view of a tensor in a part; NULL: none. */
static const un_view *view_in(const side *s, size_t tensor, size_t part, bool one_per_part) {
    if (!one_per_part) return &s->views[part * s->tensors + tensor];
    return tensor == part ? &s->views[part] : NULL;
}

/* Whether an output replaces exactly the part of the input that is copied or combined into it. */
static bool is_in_place(const call_arguments *a, size_t rank, size_t ranks, size_t output,
                        size_t input) {
    bool wide_input = un_is_wide_input(a->call.operation);
    bool wide_output = un_is_wide_output(a->call.operation);
    bool gives_parts = wide_input && !a->coalesced && a->in.tensors > 1;
    bool takes_parts = wide_output && !a->coalesced && a->out.tensors > 1;
    bool found = false;
    if (a->coalesced && input != output) return false;
    for (size_t part = 0; part < ranks; part++) {
        if (!(wide_input && wide_output) && part != rank) continue;
        const un_view *given = view_in(&a->in, input, wide_input ? part : 0, gives_parts);
        const un_view *taken = view_in(&a->out, output, wide_output ? part : 0, takes_parts);
        if (!given || !taken) continue;
        if (!are_the_same(given, taken)) return false;
        found = true;
    }
    const tensor *read = &a->in.tensor[input];
    return found && !(read->layout && overlaps_itself(read->data, read->layout));
}

/* Whether two tensors whose ranges overlap may not do so. */
static bool clashes(const call_arguments *a, size_t rank, size_t ranks, const extent *one,
                    const extent *other) {
    const side *written = a->in_place ? &a->in : &a->out;
    const tensor *t = &(one->written ? written : &a->in)->tensor[one->tensor];
    const tensor *u = &(other->written ? written : &a->in)->tensor[other->tensor];
    if ((!one->written && !other->written) ||
        !tensors_meet(t->data, t->layout, t->bytes, u->data, u->layout, u->bytes))
        return false;
    if (a->call.operation == UN_BROADCAST && t->dtype == u->dtype)
        return false; /* written in order: the last one stays; but one type comes after another */
    if (one->written && other->written) return true;
    return !is_in_place(a, rank, ranks, one->written ? one->tensor : other->tensor,
                        one->written ? other->tensor : one->tensor);
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

/* By address; in the order of the arguments where that is equal. */
static int by_address(const void *a, const void *b) {
    const extent *one = a, *other = b;
    if (one->first != other->first) return one->first < other->first ? -1 : 1;
    if (one->written != other->written) return one->written - other->written;
    return one->tensor < other->tensor ? -1 : 1;
}

int check_overlaps(const call_arguments *a, size_t rank, size_t ranks, extent found[2]) {
    size_t written = a->in_place ? a->in.tensors : a->out.tensors;
    size_t tensors = a->in.tensors + (a->in_place ? 0 : written);
    if (!written || tensors == 1) return 0;
    if (a->call.operation == UN_BROADCAST && have_one_dtype(&a->in)) return 0; /* see clashes */
    extent few[FEW];
    extent *extents = tensors <= FEW ? few : malloc(tensors * sizeof *extents);
    if (!extents) {
        PyErr_NoMemory();
        return -1;
    }
    size_t count = list_extents(extents, &a->in, a->in_place);
    if (!a->in_place) count += list_extents(extents + count, &a->out, true);
    if (!are_apart(extents, count)) qsort(extents, count, sizeof *extents, by_address);
    int failed = 0;
    for (size_t i = 0; !failed && i < count; i++)
        for (size_t j = i + 1; !failed && j < count && extents[j].first < extents[i].end; j++)
            if (clashes(a, rank, ranks, &extents[i], &extents[j])) {
                found[0] = extents[i];
                found[1] = extents[j];
                failed = REFUSED;
            }
    if (extents != few) free(extents);
    return failed;
}

/* -- for Python: the calls of other transports, and why one of ours was refused ----------------- */

PyObject *module_find_clash(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *output, *input;
    int operation, rank, ranks, coalesced;
    if (!PyArg_ParseTuple(arguments, "iOOiip", &operation, &output, &input, &rank, &ranks,
                          &coalesced))
        return NULL;
    call_arguments a;
    a.call.operation = (un_operation)operation;
    a.coalesced = coalesced;
    a.in_place = input == Py_None;
    start_side(&a.in);
    start_side(&a.out);
    size_t in_parts = un_is_wide_input(a.call.operation) ? (size_t)ranks : 1;
    size_t out_parts = un_is_wide_output(a.call.operation) ? (size_t)ranks : 1;
    bool is_read = a.in_place ? !read_list(&a.in, output)
                              : !read_side(&a.in, input, in_parts, coalesced, false) &&
                                    !read_side(&a.out, output, out_parts, coalesced, false);
    extent found[2];
    bool clash = is_read && check_overlaps(&a, (size_t)rank, (size_t)ranks, found) == REFUSED;
    free_tensors(&a);
    if (PyErr_Occurred()) return NULL;
    if (!is_read) return PyErr_Format(PyExc_ValueError, "these tensors cannot be compared");
    if (!clash) Py_RETURN_NONE;
    return Py_BuildValue("(in)(in)", !found[0].written, (Py_ssize_t)found[0].tensor,
                         !found[1].written, (Py_ssize_t)found[1].tensor);
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
