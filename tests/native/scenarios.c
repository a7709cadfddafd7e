/* Scenarios: one collective with its memory; what each rank gives, and should have afterwards. */
#include "threads.h"

enum { UNTOUCHED = 0xa5 };

/* Where a rank's memory comes from: its part of a block, or as usual. */
_Thread_local arena *scenario_memory;

static char *take_memory(size_t bytes) {
    arena *a = scenario_memory;
    if (!a || a->used + bytes + 64 > a->bytes) return malloc(bytes);
    char *taken = a->memory + a->used + a->used % 3 * 16; /* not always at a line's start */
    a->used += (bytes + 63 + 64) / 64 * 64;
    return taken;
}

static void give_memory_back(char *memory) {
    arena *a = scenario_memory;
    if (a && memory >= a->memory && memory < a->memory + a->bytes)
        a->used = 0;
    else
        free(memory);
}

/* -- memory ------------------------------------------------------------------------------------ */

char *item_at(const side *s, size_t item) {
    return s->memory + item / s->columns * s->row_bytes + item % s->columns * s->column_bytes;
}

/* One view for a part, or with pieces one for each row that it touches. */
static size_t cut_part(side *s, enum shape shape, int part, un_view *views) {
    size_t first = s->first[part], end = s->first[part + 1], count = 0, start_byte = 0;
    for (size_t item = first, next; item < end || !count; item = next) {
        next = shape == PIECES ? (item / s->columns + 1) * s->columns : end;
        if (next > end) next = end;
        un_view *v = &views[count++];
        *v = (un_view){.data = item_at(s, item),
                       .bytes = (next - item) * s->item_bytes,
                       .start = start_byte};
        if (s->layout)
            v->data = s->memory, v->layout = s->layout, v->first_byte = item * s->item_bytes;
        start_byte += v->bytes;
    }
    s->streams[part] = (un_stream){.views = views, .count = count, .bytes = start_byte};
    return count;
}

static void lay_out(side *s, size_t rows) {
    s->layout = malloc(sizeof *s->layout + 2 * sizeof s->layout->dim[0]);
    s->layout->dims = 2;
    s->layout->item_bytes = s->item_bytes;
    s->layout->dim[0] = (struct un_dim){rows, (ptrdiff_t)s->row_bytes};
    s->layout->dim[1] = (struct un_dim){s->columns, (ptrdiff_t)s->column_bytes};
}

void make_side(side *s, enum shape shape, size_t item_bytes, int parts, const size_t *items) {
    *s = (side){.item_bytes = item_bytes, .parts = parts};
    for (int part = 0; part < parts; part++) s->first[part + 1] = s->first[part] + items[part];
    size_t all = s->first[parts];
    bool gaps = shape != CONTIGUOUS;
    s->columns = shape == CONTIGUOUS ? all + 1 : shape == PIECES ? all / 3 + 1 : 5;
    s->column_bytes = shape == STRIDED ? 2 * item_bytes : item_bytes;
    s->row_bytes = s->columns * s->column_bytes + (gaps ? 3 * item_bytes : 0);
    size_t rows = all / s->columns + 1;
    s->memory_bytes = rows * s->row_bytes;
    s->memory = take_memory(s->memory_bytes);
    memset(s->memory, UNTOUCHED, s->memory_bytes);
    if (shape == ROWS || shape == STRIDED) lay_out(s, rows);
    s->views = calloc(rows + 2 * (size_t)parts, sizeof *s->views);
    un_view *next = s->views;
    for (int part = 0; part < parts; part++) next += cut_part(s, shape, part, next);
}

bool side_is_untouched(const side *s) {
    return (unsigned char)s->memory[0] == UNTOUCHED &&
           !memcmp(s->memory, s->memory + 1, s->memory_bytes - 1);
}

void free_side(side *s) {
    give_memory_back(s->memory);
    free(s->layout);
    free(s->views);
}

/* -- who gives what to whom -------------------------------------------------------------------- */

static bool wide_input(un_operation o) {
    return o == UN_REDUCE_SCATTER || o == UN_SCATTER || o == UN_ALL_TO_ALL;
}

static bool wide_output(un_operation o) {
    return o == UN_ALL_GATHER || o == UN_GATHER || o == UN_ALL_TO_ALL;
}

static bool reduces(un_operation o) {
    return o == UN_ALL_REDUCE || o == UN_REDUCE || o == UN_REDUCE_SCATTER;
}

static bool has_input(const trial *t) {
    return t->scenario.operation != UN_SCATTER || t->rank == t->scenario.root;
}

static bool has_output(const trial *t) {
    return t->scenario.operation != UN_GATHER || t->rank == t->scenario.root;
}

static bool gets_result(const trial *t) {
    return has_output(t) && (t->scenario.operation != UN_REDUCE || t->rank == t->scenario.root);
}

/* How many items `giver` gives to `taker`. */
static size_t items_between(const scenario *c, int giver, int taker) {
    if (!c->uneven) return c->items;
    switch (c->operation) {
    case UN_ALL_TO_ALL: return c->items * (size_t)((giver + 2 * taker) % 3);
    case UN_GATHER:
    case UN_ALL_GATHER: return c->items * (size_t)(giver % 3);
    case UN_SCATTER:
    case UN_REDUCE_SCATTER: return c->items * (size_t)(taker % 3);
    default: return c->items;
    }
}

static number given(const trial *t, int giver, int taker, size_t item) {
    const scenario *c = &t->scenario;
    uint64_t where = (uint64_t)giver << 56 | (uint64_t)taker << 48 | item;
    return choose_number(c->type, c->reduction, t->ranks, scramble(c->seed ^ where));
}

/* What should come to this rank from `part`, or from all. */
static number wanted(const trial *t, int part, size_t item) {
    const scenario *c = &t->scenario;
    int taker = wide_input(c->operation) ? t->rank : 0;
    if (!reduces(c->operation)) {
        bool rooted = c->operation == UN_BROADCAST || c->operation == UN_SCATTER;
        return given(t, rooted ? c->root : part, taker, item);
    }
    number all[MOST_RANKS];
    for (int rank = 0; rank < t->ranks; rank++) all[rank] = given(t, rank, taker, item);
    return reduce_numbers(c->type, c->reduction, all, t->ranks);
}

static void give(const trial *t, const side *s, int part, int taker) {
    for (size_t item = s->first[part]; item < s->first[part + 1]; item++)
        encode(t->scenario.type, given(t, t->rank, taker, item - s->first[part]), item_at(s, item));
}

static void make_input(trial *t) {
    const scenario *c = &t->scenario;
    size_t items[MOST_RANKS];
    int parts = wide_input(c->operation) ? t->ranks : 1;
    for (int part = 0; part < parts; part++) items[part] = items_between(c, t->rank, part);
    make_side(&t->input, c->shape, item_bytes_of(c->type), parts, items);
    for (int part = 0; part < parts; part++) give(t, &t->input, part, part);
}

static void make_output(trial *t) {
    const scenario *c = &t->scenario;
    size_t items[MOST_RANKS];
    int parts = wide_output(c->operation) ? t->ranks : 1;
    for (int part = 0; part < parts; part++) items[part] = items_between(c, part, t->rank);
    make_side(&t->output, c->shape, item_bytes_of(c->type), parts, items);
}

un_call barrier(void) {
    return (un_call){.operation = UN_BARRIER, .timeout_ns = 60 * SECOND_NS};
}

un_call sum_of(const un_stream *stream) {
    un_call call = barrier();
    call.operation = UN_ALL_REDUCE;
    call.dtype = dtype_of(FLOAT32);
    call.input = call.output = stream;
    return call;
}

void prepare_trial(trial *t, const scenario *c, int rank, int ranks) {
    *t = (trial){.scenario = *c, .rank = rank, .ranks = ranks, .call = barrier()};
    if (c->operation == UN_BARRIER) return;
    un_call *call = &t->call;
    call->operation = c->operation;
    call->reduction = c->reduction;
    call->dtype = dtype_of(c->type);
    call->root = c->root;
    call->factor = factor_for(c->type);
    bool foldable = c->operation == UN_BROADCAST || c->operation == UN_ALL_GATHER ||
                    c->operation == UN_ALL_REDUCE || c->operation == UN_REDUCE;
    t->scenario.in_place = foldable && (c->in_place || c->operation == UN_BROADCAST);
    if (has_output(t)) make_output(t);
    if (t->scenario.in_place) {
        int part = wide_output(c->operation) ? rank : 0;
        give(t, &t->output, part, 0);
        call->input = &t->output.streams[part];
    } else if (has_input(t)) {
        make_input(t);
        call->input = t->input.streams;
    }
    call->output = has_output(t) ? t->output.streams : NULL;
}

/* -- what became of it ------------------------------------------------------------------------- */

static void check_items(const trial *t, const side *s, int part, bool is_input) {
    int type = t->scenario.type;
    size_t bytes = item_bytes_of(type);
    for (size_t item = s->first[part]; item < s->first[part + 1]; item++) {
        char want[16];
        size_t inside = item - s->first[part];
        int taker = wide_input(t->scenario.operation) ? part : 0;
        encode(type, is_input ? given(t, t->rank, taker, inside) : wanted(t, part, inside), want);
        if (!memcmp(item_at(s, item), want, bytes)) continue;
        fprintf(stderr, "operation %d, reduction %d, type %d, rank %d of %d, part %d: item %zu\n",
                t->scenario.operation, t->scenario.reduction, type, t->rank, t->ranks, part,
                inside);
        EXPECT(!"an item is as expected");
    }
}

/* All items as expected, and nothing else touched. */
static void check_side(const trial *t, const side *s, bool is_input) {
    for (int part = 0; part < s->parts; part++) check_items(t, s, part, is_input);
    for (size_t item = 0; item < s->first[s->parts]; item++)
        memset(item_at(s, item), UNTOUCHED, s->item_bytes);
    EXPECT(side_is_untouched(s));
}

void check_trial(trial *t) {
    if (t->input.memory) check_side(t, &t->input, true);
    if (!t->output.memory) return;
    if (gets_result(t))
        check_side(t, &t->output, false);
    else if (t->scenario.in_place)
        check_side(t, &t->output, true);
    else
        EXPECT(side_is_untouched(&t->output));
}

void free_trial(trial *t) {
    free_side(&t->input);
    free_side(&t->output);
}

void run_scenario(const membership *me, const scenario *c) {
    trial t;
    prepare_trial(&t, c, me->rank, me->ranks);
    EXPECT_EQUAL(un_run(me->group, &t.call), UN_OK);
    check_trial(&t);
    free_trial(&t);
}

/* -- at random --------------------------------------------------------------------------------- */

scenario random_scenario(uint64_t random, int ranks, size_t most_items) {
    uint64_t more = scramble(random);
    scenario c = {.operation = UN_BARRIER + random % 9,
                  .type = (int)((random >> 8) % TYPES),
                  .reduction = (random >> 16) % UN_REDUCTIONS,
                  .root = (int)((random >> 24) % (uint64_t)ranks),
                  .uneven = random >> 32 & 1,
                  .in_place = random >> 33 & 1,
                  .shape = (random >> 36) % SHAPES,
                  .items = more % most_items >> (more >> 32) % 16, /* small ones more often */
                  .seed = more};
    if (c.type == OPAQUE && reduces(c.operation)) c.type = FLOAT32;
    while (!un_reducible(dtype_of(c.type), c.reduction) && c.type != OPAQUE)
        c.reduction = (c.reduction + 1) % UN_REDUCTIONS;
    return c;
}

void run_random_scenario(const membership *me, uint64_t random, size_t most_items) {
    scenario c = random_scenario(random, me->ranks, most_items);
    run_scenario(me, &c);
}
