#include "torch_ops/operators.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "torch_ops/torch_abi.h"

enum { ASK_AGAIN = 100, FEW_RANKS = 16 }; /* ASK_AGAIN: as in python/, nothing was begun */

/* -- groups by name ---------------------------------------------------------------------------- */

typedef struct known_group {
    struct known_group *next;
    operator_group of;
    unsigned running; /* calls under way */
    bool is_forgotten;
    char name[];
} known_group;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static known_group *known;
static operator_hooks hooks;

bool operators_know(const char *name, const operator_group *group) {
    size_t length = strlen(name) + 1;
    known_group *k = malloc(sizeof *k + length);
    if (!k) return false;
    *k = (known_group){.of = *group};
    memcpy(k->name, name, length);
    pthread_mutex_lock(&lock);
    k->next = known;
    known = k;
    pthread_mutex_unlock(&lock);
    return true;
}

forgotten operators_forget(void **owner, const char *name) {
    forgotten how = NOT_KNOWN;
    pthread_mutex_lock(&lock);
    known_group **at = &known;
    while (*at && (*owner ? (*at)->of.owner != *owner : strcmp((*at)->name, name) != 0))
        at = &(*at)->next;
    known_group *k = *at;
    if (k) {
        *at = k->next;
        *owner = k->of.owner;
        k->is_forgotten = true;
        how = k->running ? STILL_RUNS : FORGOTTEN;
    }
    pthread_mutex_unlock(&lock);
    if (how == FORGOTTEN) free(k);
    return how;
}

static known_group *enter(const char *name) {
    pthread_mutex_lock(&lock);
    known_group *k = known;
    while (k && strcmp(k->name, name) != 0) k = k->next;
    if (k) k->running++;
    pthread_mutex_unlock(&lock);
    return k;
}

static void leave(known_group *k) {
    pthread_mutex_lock(&lock);
    bool is_last = k->is_forgotten && k->running == 1;
    k->running--;
    pthread_mutex_unlock(&lock);
    if (!is_last) return;
    hooks.end_use(k->of.owner);
    free(k);
}

/* -- tensors ----------------------------------------------------------------------------------- */

typedef struct memory {
    char *data;
    size_t bytes;
    un_dtype dtype;
} memory;

/* False: Python says what is to be done with it. */
static bool read_tensor(memory *m, handle tensor) {
    void *data;
    int64_t elements, offset, storage_bytes;
    int32_t dtype;
    bool contiguous;
    if (torch.is_contiguous(tensor, &contiguous) || !contiguous || torch.dtype(tensor, &dtype) ||
        torch.numel(tensor, &elements) || torch.storage_offset(tensor, &offset) ||
        torch.storage_size(tensor, &storage_bytes) || torch.data_ptr(tensor, &data) || dtype < 0 ||
        dtype >= DTYPES || !torch.dtypes[dtype] || elements < 0)
        return false;
    m->dtype = torch.dtypes[dtype];
    size_t item_bytes = (m->dtype >> 8 & 0xff) / 8;
    m->data = data;
    m->bytes = (size_t)elements * item_bytes;
    return !m->bytes ||
           (size_t)offset * item_bytes + m->bytes <= (size_t)storage_bytes; /* shrunk? */
}

static bool overlap(const memory *a, const memory *b) {
    return a->data < b->data + b->bytes && b->data < a->data + a->bytes;
}

/* -- calls ------------------------------------------------------------------------------------- */

/* An operator's arguments. */
typedef struct asked {
    un_operation operation;
    bool in_place; /* the input is the output */
    handle output, input;
    handle group, reduction; /* strings; a reduction may be NULL */
    int64_t root;
} asked;

static int find_reduction(handle string) {
    static const char *const names[] = {"sum", "avg",  "product", "min",
                                        "max", "band", "bor",     "bxor"};
    const char *text;
    if (!string) return UN_SUM;
    if (torch.string_c_str(string, &text)) return -1;
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (!strcmp(text, names[i])) return i;
    return -1;
}

/* Cut memory into streams, one for each part. */
static void cut(un_stream *streams, un_view *views, const memory *m, size_t parts) {
    size_t bytes = m->bytes / parts;
    for (size_t i = 0; i < parts; i++) {
        views[i] = (un_view){.data = m->data + i * bytes, .bytes = bytes};
        streams[i] = (un_stream){.views = &views[i], .count = 1, .bytes = bytes};
    }
}

static int run_in(const operator_group *k, const asked *a, un_call *call, const memory *out,
                  const memory *in) {
    size_t ranks = (size_t)k->ranks;
    size_t outs = un_is_wide_output(call->operation) ? ranks : 1;
    size_t ins = un_is_wide_input(call->operation) ? ranks : 1;
    size_t item_bytes = (out->dtype >> 8 & 0xff) / 8;
    bool fits = out->bytes * ins == in->bytes * outs && out->bytes % (outs * item_bytes) == 0 &&
                in->bytes % (ins * item_bytes) == 0;
    int owner = out->bytes ? un_group_owner(k->group, out->data, 1) : -1;
    bool has_root = !un_is_rooted(call->operation) || (a->root >= 0 && a->root < k->ranks);
    if (!fits || !has_root || (owner >= 0 && owner != k->rank)) return ASK_AGAIN;
    un_view few_views[2 * FEW_RANKS], *views = few_views;
    un_stream few_streams[2 * FEW_RANKS], *streams = few_streams;
    if (ranks > FEW_RANKS) {
        views = malloc((outs + ins) * sizeof *views);
        streams = malloc((outs + ins) * sizeof *streams);
    }
    int status = ASK_AGAIN;
    if (views && streams) {
        cut(streams, views, out, outs);
        if (!a->in_place) cut(streams + outs, views + outs, in, ins);
        call->output = streams;
        call->input = a->in_place ? streams : streams + outs;
        call->timeout_ns = *k->timeout_ns;
        status = (int)un_run(k->group, call);
    }
    if (!status && call->operation == UN_REDUCE && k->rank != call->root)
        memset(out->data, 0, out->bytes); /* sum_to_root_ */
    if (views != few_views) free(views);
    if (streams != few_streams) free(streams);
    return status;
}

/* Run the call: a status. */
static int run(const asked *a) {
    memory out, in;
    const char *name;
    int reduction = find_reduction(a->reduction);
    /* with gradients, Python must look at the tensor first */
    if (torch.grad_mode_is_enabled() || reduction < 0 || !read_tensor(&out, a->output))
        return ASK_AGAIN;
    in = out;
    if (!a->in_place &&
        (!read_tensor(&in, a->input) || in.dtype != out.dtype || overlap(&in, &out)))
        return ASK_AGAIN;
    if (un_reduces(a->operation) && !un_reducible(out.dtype, (un_reduction)reduction))
        return ASK_AGAIN;
    known_group *k = torch.string_c_str(a->group, &name) ? NULL : enter(name);
    if (!k) return ASK_AGAIN;
    un_call call = {.operation = a->operation,
                    .reduction = (un_reduction)reduction,
                    .dtype = out.dtype,
                    .root = (int)a->root,
                    .factor = 1,
                    .pause = hooks.pause};
    if (un_reduces(a->operation) && *k->of.is_reproducible) call.form = UN_REPRODUCIBLE;
    int status = run_in(&k->of, a, &call, &out, &in);
    if (status && status != ASK_AGAIN) hooks.fail(k->of.owner);
    leave(k);
    return status;
}

/* Tell autograd that the tensor was written to, as torch's own operators in place do: exchanging a
 * dimension with itself counts as a change. */
static void count_write(handle tensor) {
    handle same;
    if (torch.new_tensor(tensor, &same)) return;
    stable_value stack[] = {(stable_value)(uintptr_t)same, 0, 0};
    if (!torch.call_dispatcher("aten::transpose_", "", stack, TORCH_VERSION))
        torch.delete_tensor((handle)(uintptr_t)stack[0]);
}

/* Leave the call to Python: how it failed, or NULL. Takes the handles. */
static handle go_on(asked *a, int status) {
    if (a->in_place) torch.new_tensor(a->output, &a->input);
    if (!a->reduction) torch.new_string("sum", 3, &a->reduction);
    stable_value stack[] = {(stable_value)(uintptr_t)a->output,
                            (stable_value)(uintptr_t)a->input,
                            (stable_value)(uintptr_t)a->group,
                            (stable_value)a->operation,
                            (stable_value)(uintptr_t)a->reduction,
                            (stable_value)a->root,
                            (stable_value)status};
    if (torch.call_dispatcher("unisono::go_on", "", stack, TORCH_VERSION))
        torch_abi_throw("torch could not call unisono's operator go_on");
    return (handle)(uintptr_t)stack[0];
}

static void fail_with(handle string) {
    const char *text;
    char copy[8192];
    if (torch.string_c_str(string, &text)) text = "an operator of unisono failed";
    strncpy(copy, text, sizeof copy - 1);
    copy[sizeof copy - 1] = '\0';
    torch.delete_string(string);
    if (*copy) torch_abi_throw(copy);
}

static void perform(asked *a) {
    int status = run(a);
    if (status) {
        fail_with(go_on(a, status));
        return;
    }
    count_write(a->output);
    torch.delete_tensor(a->output);
    if (!a->in_place) torch.delete_tensor(a->input);
    torch.delete_string(a->group);
    if (a->reduction) torch.delete_string(a->reduction);
}

static handle take(stable_value value) { return (handle)(uintptr_t)value; }

/* all_reduce_(x, group, op) */
static void all_reduce(stable_value *stack, uint64_t arguments, uint64_t results) {
    (void)arguments, (void)results;
    asked a = {.operation = UN_ALL_REDUCE,
               .in_place = true,
               .output = take(stack[0]),
               .group = take(stack[1]),
               .reduction = take(stack[2])};
    perform(&a);
}

/* name(x, group, root) */
static void with_root(un_operation operation, stable_value *stack) {
    asked a = {.operation = operation,
               .in_place = true,
               .output = take(stack[0]),
               .group = take(stack[1]),
               .root = (int64_t)stack[2]};
    perform(&a);
}

static void broadcast(stable_value *stack, uint64_t arguments, uint64_t results) {
    (void)arguments, (void)results;
    with_root(UN_BROADCAST, stack);
}

static void sum_to_root(stable_value *stack, uint64_t arguments, uint64_t results) {
    (void)arguments, (void)results;
    with_root(UN_REDUCE, stack);
}

/* name(output, input, group[, op]) */
static void of_two(un_operation operation, stable_value *stack) {
    bool reduces = un_reduces(operation);
    asked a = {.operation = operation,
               .output = take(stack[0]),
               .input = take(stack[1]),
               .group = take(stack[2]),
               .reduction = reduces ? take(stack[3]) : NULL};
    perform(&a);
}

static void all_gather(stable_value *stack, uint64_t arguments, uint64_t results) {
    (void)arguments, (void)results;
    of_two(UN_ALL_GATHER, stack);
}

static void reduce_scatter(stable_value *stack, uint64_t arguments, uint64_t results) {
    (void)arguments, (void)results;
    of_two(UN_REDUCE_SCATTER, stack);
}

static void all_to_all(stable_value *stack, uint64_t arguments, uint64_t results) {
    (void)arguments, (void)results;
    of_two(UN_ALL_TO_ALL, stack);
}

const char *operators_load(const char *path, const operator_hooks *given) {
    static const struct {
        const char *name;
        operator_body *body;
    } bodies[] = {{"all_reduce_", all_reduce},         {"broadcast_", broadcast},
                  {"sum_to_root_", sum_to_root},       {"all_gather_", all_gather},
                  {"reduce_scatter_", reduce_scatter}, {"all_to_all_", all_to_all}};
    const char *missing = torch_abi_load(path);
    if (missing) return missing;
    hooks = *given;
    handle library; /* never deleted: that would take the operators back */
    if (torch.library_init_impl("unisono", "CPU", __FILE__, __LINE__, &library)) return "a library";
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++)
        if (torch.library_impl(library, bodies[i].name, bodies[i].body, TORCH_VERSION))
            return bodies[i].name;
    return NULL;
}
