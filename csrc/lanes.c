/* Large calls over hosts.
 *
 * Ranks of one host combine and share by their inner group; what goes between hosts is sent from where it
 * lies to where it is needed, and crosses the network once for each host that needs it. For sums the j-th
 * ranks of all hosts form a lane, which has the j-th part of the tensor: each host combines it inside,
 * the hosts of the lane combine a share of it each, and pass the result on. A tensor goes in chunks, of which
 * several are under way: while one crosses the network the next is combined.
 *
 * Between two ranks data is numbered in the order in which both come to it, which is that of the program.
 * On failure a call does not return before nobody uses its caller's memory any more.
 */
#include <stdlib.h>

#include "hosts.h"
#include "stream.h"

enum {
    LANE_BYTES = 512 * 1024,  /* of a chunk, for each lane */
    ROW_BYTES = 256 * 1024,  /* of each rank's row in a chunk */
    CHAIN_BYTES = 512 * 1024, /* of a broadcast, that a host passes on at once */
    STRICT_BYTES = 8 * 1024 * 1024,
    DEPTH = 5,                /* chunks under way, */
    AHEAD = DEPTH - 1,        /* of rows, before the first of them is shared */
    SETTLING_NS = 1000 * 1000 * 1000,
    GRACE_NS = 500 * 1000 * 1000, /* for ranks of our own host: who waits for another knows whom it misses */
};

/* -- data between hosts -------------------------------------------------------------------------- */

struct wanted { /* data that has not come yet */
    struct wanted *next;
    int from;
    uint64_t number;
    char *to;
    size_t bytes;
    transfer *transfer;
};

typedef struct flight { /* what one call gives or takes */
    struct flight *next;
    transfer transfer;
    struct wanted wanted;
    int peer;
    bool is_wanted; /* stands in the list */
} flight;

typedef struct lane_call {
    execution *x;
    un_group *g;
    spread *s;
    un_call inner; /* what its calls have in common */
} lane_call;

typedef struct batch { /* flights that are waited for together */
    flight *first;
} batch;

/* With the network's lock: data has come that somebody wants. */
static bool fill_wanted(spread *s, const struct wanted *w, const void *data, size_t bytes,
                        remote_data *remote) {
    if (bytes != w->bytes) {
        atomic_store(&w->transfer->state, IS_BROKEN); /* or the call would wait for it, even then */
        abort_group(s->group, UN_DAMAGED, w->from, 0);
        return false;
    }
    if (remote) {
        fetch_to(remote, w->to, bytes, w->transfer);
        return true;
    }
    if (bytes) memcpy(w->to, data, bytes);
    atomic_store(&w->transfer->state, HAS_LANDED);
    return false;
}

bool receive_data(spread *s, const wire *head, const void *data, size_t bytes, remote_data *remote) {
    for (struct wanted **link = &s->wanted; *link; link = &(*link)->next) {
        struct wanted *w = *link;
        if (w->from != head->from || w->number != head->number) continue;
        *link = w->next;
        ((flight *)(void *)((char *)w - offsetof(flight, wanted)))->is_wanted = false;
        return fill_wanted(s, w, data, bytes, remote);
    }
    parcel *p = keep_parcel(head, data, bytes, remote);
    if (p) push_parcel(&s->early, p);
    return p != NULL;
}

static parcel *take_early(spread *s, int from, uint64_t number) {
    for (parcel **link = &s->early.first; *link; link = &(*link)->next) {
        parcel *p = *link;
        if (p->head.from != from || p->head.number != number) continue;
        *link = p->next;
        for (s->early.last = &s->early.first; *s->early.last;) s->early.last = &(*s->early.last)->next;
        return p;
    }
    return NULL;
}

static uint64_t data_number(const lane_call *l, uint32_t *count) {
    return l->x->number << 24 | (uint64_t)((*count)++ & 0xffffff);
}

static flight *new_flight(lane_call *l, batch *b, int peer) {
    flight *f = calloc(1, sizeof *f);
    if (!f) {
        abort_group(l->g, UN_ABORTED, l->g->rank, l->x->number);
        return NULL;
    }
    f->peer = peer;
    f->next = b->first;
    b->first = f;
    f->transfer.link = link_of(l->g, peer);
    return f;
}

static void give(lane_call *l, batch *b, int peer, const void *data, size_t bytes) {
    flight *f = bytes ? new_flight(l, b, peer) : NULL;
    if (!f) return;
    wire head = wire_of(l->g, WIRE_DATA);
    head.number = data_number(l, &l->s->given[peer]);
    send_from(f->transfer.link, &head, data, bytes, &f->transfer);
}

static void want(lane_call *l, batch *b, int peer, void *to, size_t bytes) {
    flight *f = bytes ? new_flight(l, b, peer) : NULL;
    if (!f) return;
    spread *s = l->s;
    f->wanted = (struct wanted){.from = peer,
                                .number = data_number(l, &s->taken[peer]),
                                .to = to,
                                .bytes = bytes,
                                .transfer = &f->transfer};
    lock_network();
    parcel *p = take_early(s, peer, f->wanted.number);
    if (p) {
        if (fill_wanted(s, &f->wanted, p->data, p->bytes, p->remote)) p->remote = NULL;
        drop_parcel(p);
    } else {
        f->is_wanted = true;
        f->wanted.next = s->wanted;
        s->wanted = &f->wanted;
    }
    unlock_network();
}

static bool is_over(const flight *f) { return atomic_load(&f->transfer.state) == HAS_LANDED; }

static un_status await_flight(lane_call *l, flight *f) {
    un_group *g = l->g;
    patience *p = &l->x->patience;
    int64_t start = clock_ns(), budget_ns = g->crowded ? 0 : begin_spin(g, &g->spin, -1);
    while (!is_over(f) && clock_ns() - start < budget_ns) drive_network();
    if (budget_ns) end_spin(g, &g->spin, is_over(f));
    while (!is_over(f)) {
        uint32_t seen = network_rounds();
        drive_network();
        if (is_over(f)) break;
        un_status status = look_after(g, p, f->peer);
        if (status) return status;
        await_network(seen, SLICE_NS);
    }
    return UN_OK;
}

static un_status land(lane_call *l, batch *b) {
    for (flight *f; (f = b->first);) {
        un_status status = await_flight(l, f);
        if (status) return status;
        b->first = f->next;
        free(f);
    }
    return UN_OK;
}

/* What UCX has not let go of by itself soon, it does when its link is cut: then a peer is stopped, or
 * gone. */
void settle(transfer *const *transfers, size_t count) {
    int64_t end = clock_ns() + SETTLING_NS;
    for (size_t i = 0; i < count; i++) {
        transfer *t = transfers[i];
        while (atomic_load(&t->state) == UNDER_WAY_YET) {
            uint32_t seen = network_rounds();
            if (clock_ns() > end) cut_link(t->link);
            if (!drive_network() && atomic_load(&t->state) == UNDER_WAY_YET)
                await_network(seen, 1000 * 1000);
        }
    }
}

/* The call has failed. */
static void settle_batch(lane_call *l, batch *b) {
    if (!b->first) return;
    release_data(l->s); /* before we wait for others, who may wait for that */
    lock_network();
    for (flight *f = b->first; f; f = f->next) {
        if (!f->is_wanted) continue;
        struct wanted **link = &l->s->wanted;
        while (*link != &f->wanted) link = &(*link)->next;
        *link = f->wanted.next;
        atomic_store(&f->transfer.state, IS_BROKEN);
    }
    unlock_network();
    for (flight *f; (f = b->first); free(f)) {
        settle((transfer *[]){&f->transfer}, 1);
        b->first = f->next;
    }
}

/* -- inside a host --------------------------------------------------------------------------------- */

typedef struct piece {
    char *data;
    size_t bytes;
} piece;

static un_stream stream_of(const piece *pieces, size_t count, un_view *views) {
    un_stream s = {.views = views, .count = count};
    for (size_t i = 0; i < count; i++) {
        views[i] = (un_view){.data = pieces[i].data, .bytes = pieces[i].bytes, .start = s.bytes};
        s.bytes += pieces[i].bytes;
    }
    return s;
}

/* A call of the inner group. What fails there fails here. */
static un_status run_inside(lane_call *l, un_operation operation, int root, const un_stream *input,
                            const un_stream *output) {
    un_group *g = l->g, *inner = l->s->inner;
    un_call call = l->inner;
    call.operation = operation;
    call.root = root;
    call.input = input;
    call.output = output;
    call.timeout_ns = l->x->patience.deadline_ns - clock_ns() + GRACE_NS;
    if (call.timeout_ns < 1) call.timeout_ns = 1;
    drive_network();
    un_status status = un_run(inner, &call);
    if (!status) return UN_OK;
    un_failure f = un_group_failure(inner);
    const host *here = &l->s->host[l->s->mine];
    int rank = f.rank >= 0 && f.rank < here->count ? here->ranks[f.rank] : -1;
    if (!status_from_abort(g)) { /* the cause is told by the outer group, as soon as that knows it */
        if (status == UN_INTERRUPTED) return interrupt(g, l->x->number);
        abort_group(g, status, rank, l->x->number);
    }
    return fail_from_abort(g);
}

static char *scratch(lane_call *l, int which, size_t bytes) {
    spread *s = l->s;
    if (s->scratch_bytes[which] < bytes) {
        free(s->scratch[which]);
        s->scratch[which] = aligned_alloc(LINE_BYTES, round_up(bytes, LINE_BYTES));
        s->scratch_bytes[which] = s->scratch[which] ? bytes : 0;
    }
    if (bytes && !s->scratch[which]) abort_group(l->g, UN_NO_MEMORY, l->g->rank, l->x->number);
    return s->scratch[which];
}

/* Where part `part` begins if `items` are cut into `parts`; the first ones get what is left over. */
static size_t cut(size_t items, size_t parts, size_t part) {
    size_t over = items % parts;
    return items / parts * part + (part < over ? part : over);
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* -- all_reduce, reduce ----------------------------------------------------------------------------- */

typedef struct lane_sum { /* one all_reduce or reduce */
    lane_call *l;
    host_arithmetic a;
    const char *in;
    char *out;
    size_t items, chunk_items;
    int lanes, root; /* -1: everybody has the result */
    char *wide, *partials, *theirs, *result; /* of DEPTH chunks each, but for `wide` */
    size_t lane_bytes;                       /* the most that a lane has of a chunk */
    batch first[DEPTH], second[DEPTH];
} lane_sum;

/* Elements [begin, end) of the tensor. */
typedef struct range {
    size_t begin, end;
} range;

static range chunk_of(const lane_sum *r, size_t chunk) {
    size_t begin = chunk * r->chunk_items;
    return (range){begin, least(begin + r->chunk_items, r->items)};
}

static range part_of(range whole, int parts, int part) {
    size_t items = whole.end - whole.begin;
    return (range){whole.begin + cut(items, (size_t)parts, (size_t)part),
                   whole.begin + cut(items, (size_t)parts, (size_t)part + 1)};
}

/* The share of a lane's part that a host combines for all: for a reduce, the root's host has it all. */
static range share_of(const lane_sum *r, range part, int host) {
    const spread *s = r->l->s;
    if (r->root < 0) return part_of(part, s->hosts, host);
    return host == s->host_of[r->root] ? part : (range){part.begin, part.begin};
}

static bool has_lane(const lane_sum *r) { return r->l->s->index < r->lanes; }

static range lane_part(const lane_sum *r, size_t chunk, int lane) {
    return lane < r->lanes ? part_of(chunk_of(r, chunk), r->lanes, lane) : (range){0, 0};
}

static size_t length_of(range r) { return r.end - r.begin; }

static int peer_in_lane(const lane_sum *r, int host) {
    const spread *s = r->l->s;
    return s->host[host].ranks[s->index];
}

static char *partial_of(const lane_sum *r, size_t chunk) {
    return r->partials + chunk % DEPTH * r->lane_bytes;
}

static char *theirs_of(const lane_sum *r, size_t chunk, int host) {
    return r->theirs + (chunk % DEPTH * (size_t)r->l->s->hosts + (size_t)host) * r->lane_bytes;
}

/* The ranks of this host combine their chunk; each lane has its part of that. */
static un_status combine_inside(lane_sum *r, size_t chunk) {
    lane_call *l = r->l;
    int here = l->s->host[l->s->mine].count;
    range whole = chunk_of(r, chunk);
    const char *from = r->in + whole.begin * r->a.item_bytes;
    if (r->a.widen) {
        convert(r->a.widen, r->wide, from, length_of(whole));
        from = r->wide;
    }
    un_stream input[UN_MAX_RANKS], output;
    un_view views[UN_MAX_RANKS], view;
    for (int lane = 0; lane < here; lane++) {
        range part = lane_part(r, chunk, lane);
        size_t first = lane < r->lanes ? part.begin - whole.begin : 0;
        piece p = {(char *)(uintptr_t)from + first * r->a.wide_bytes,
                   length_of(part) * r->a.wide_bytes};
        input[lane] = stream_of(&p, 1, &views[lane]);
    }
    piece mine = {partial_of(r, chunk), input[l->s->index].bytes};
    output = stream_of(&mine, 1, &view);
    return run_inside(l, UN_REDUCE_SCATTER, 0, input, &output);
}

/* Each host has the others' sums of its share. */
static void exchange_sums(lane_sum *r, size_t chunk) {
    lane_call *l = r->l;
    const spread *s = l->s;
    range part = lane_part(r, chunk, s->index), mine = share_of(r, part, s->mine);
    batch *b = &r->first[chunk % DEPTH];
    for (int step = 1; step < s->hosts; step++) {
        int host = (s->mine + step) % s->hosts;
        want(l, b, peer_in_lane(r, host), theirs_of(r, chunk, host),
             length_of(mine) * r->a.wide_bytes);
    }
    for (int step = 1; step < s->hosts; step++) {
        int host = (s->mine + step) % s->hosts;
        range theirs = share_of(r, part, host);
        give(l, b, peer_in_lane(r, host),
             partial_of(r, chunk) + (theirs.begin - part.begin) * r->a.wide_bytes,
             length_of(theirs) * r->a.wide_bytes);
    }
}

static char *result_at(const lane_sum *r, size_t chunk, range part, size_t item) {
    if (r->root < 0) return r->out + item * r->a.item_bytes;
    return r->result + chunk % DEPTH * r->lane_bytes + (item - part.begin) * r->a.item_bytes;
}

/* Combine our share, and pass it on to the others, who do the same with theirs. */
static un_status combine_hosts(lane_sum *r, size_t chunk) {
    lane_call *l = r->l;
    const spread *s = l->s;
    const host_arithmetic *a = &r->a;
    un_status status = land(l, &r->first[chunk % DEPTH]);
    if (status) return status;
    range part = lane_part(r, chunk, s->index), mine = share_of(r, part, s->mine);
    size_t items = length_of(mine);
    char *to = result_at(r, chunk, part, mine.begin);
    if (items) {
        const void *sums[UN_MAX_RANKS];
        char *own = partial_of(r, chunk) + (mine.begin - part.begin) * a->wide_bytes;
        for (int h = 0; h < s->hosts; h++) sums[h] = h == s->mine ? own : theirs_of(r, chunk, h);
        a->second.run(a->narrow ? own : to, sums, s->hosts, items * a->wide_bytes / a->second.unit,
                      a->divisor);
        if (a->narrow) convert(a->narrow, to, own, items);
    }
    batch *b = &r->second[chunk % DEPTH];
    for (int step = 1; r->root < 0 && step < s->hosts; step++) {
        int host = (s->mine + step) % s->hosts;
        range theirs = share_of(r, part, host);
        want(l, b, peer_in_lane(r, host), r->out + theirs.begin * a->item_bytes,
             length_of(theirs) * a->item_bytes);
    }
    for (int step = 1; r->root < 0 && step < s->hosts; step++)
        give(l, b, peer_in_lane(r, (s->mine + step) % s->hosts), to, items * a->item_bytes);
    return UN_OK;
}

/* The lanes of this host tell each other what they have; of a reduce, they tell the root. */
static un_status share_inside(lane_sum *r, size_t chunk) {
    lane_call *l = r->l;
    const spread *s = l->s;
    un_status status = land(l, &r->second[chunk % DEPTH]);
    if (status) return status;
    bool is_rooted = r->root >= 0;
    if (is_rooted && s->host_of[r->root] != s->mine) return UN_OK;
    un_stream input, output[UN_MAX_RANKS];
    un_view view, views[UN_MAX_RANKS];
    range mine = lane_part(r, chunk, s->index);
    piece given = {result_at(r, chunk, mine, mine.begin), length_of(mine) * r->a.item_bytes};
    input = stream_of(&given, 1, &view);
    for (int lane = 0; r->out && lane < s->host[s->mine].count; lane++) {
        range part = lane_part(r, chunk, lane);
        piece p = {r->out + part.begin * r->a.item_bytes, length_of(part) * r->a.item_bytes};
        output[lane] = stream_of(&p, 1, &views[lane]);
    }
    if (!is_rooted) return run_inside(l, UN_ALL_GATHER, 0, &input, output);
    return run_inside(l, UN_GATHER, s->index_of[r->root], &input,
                      r->root == l->g->rank ? output : NULL);
}

static un_status run_steps(lane_sum *r) {
    size_t chunks = (r->items + r->chunk_items - 1) / r->chunk_items;
    un_status status = UN_OK;
    for (size_t time = 0; !status && time < chunks + 2; time++) {
        if (time < chunks) {
            status = combine_inside(r, time);
            if (!status && has_lane(r)) exchange_sums(r, time);
        }
        if (!status && time >= 1 && time - 1 < chunks && has_lane(r))
            status = combine_hosts(r, time - 1);
        if (!status && time >= 2) status = share_inside(r, time - 2);
    }
    for (int i = 0; i < DEPTH; i++) {
        settle_batch(r->l, &r->first[i]);
        settle_batch(r->l, &r->second[i]);
    }
    return status;
}

static un_status reduce_in_lanes(lane_call *l, const char *in, char *out, size_t bytes, int root) {
    const spread *s = l->s;
    lane_sum r = {.l = l, .a = arithmetic_of(l->g, l->x->call), .in = in, .out = out, .root = root};
    r.lanes = s->host[0].count;
    for (int h = 1; h < s->hosts; h++) r.lanes = s->host[h].count < r.lanes ? s->host[h].count : r.lanes;
    r.items = bytes / r.a.item_bytes;
    r.chunk_items = least(r.items, (size_t)r.lanes * LANE_BYTES / r.a.item_bytes);
    size_t lane_items = (r.chunk_items + (size_t)r.lanes - 1) / (size_t)r.lanes;
    r.lane_bytes = round_up(lane_items * r.a.wide_bytes, LINE_BYTES);
    r.wide = r.a.widen ? scratch(l, 0, r.chunk_items * r.a.wide_bytes) : NULL;
    r.partials = scratch(l, 1, DEPTH * r.lane_bytes);
    r.theirs = scratch(l, 2, DEPTH * (size_t)s->hosts * r.lane_bytes);
    r.result = root >= 0 ? scratch(l, 3, DEPTH * r.lane_bytes) : NULL;
    if (status_from_abort(l->g)) return fail_from_abort(l->g);
    l->inner.dtype = r.a.dtype;
    l->inner.reduction = r.a.inside;
    return run_steps(&r);
}

/* -- pairs: gather, scatter, all_to_all --------------------------------------------------------------- */

/* What each rank gives to and takes from each, directly. */
static un_status move_pairs(lane_call *l, const piece *gives, const piece *takes) {
    un_group *g = l->g;
    const spread *s = l->s;
    const host *here = &s->host[s->mine];
    batch b = {0};
    for (int step = 1; step < g->ranks; step++) {
        int peer = (g->rank + step) % g->ranks;
        if (is_elsewhere(g, peer)) want(l, &b, peer, takes[peer].data, takes[peer].bytes);
    }
    for (int step = 1; step < g->ranks; step++) {
        int peer = (g->rank + step) % g->ranks;
        if (is_elsewhere(g, peer)) give(l, &b, peer, gives[peer].data, gives[peer].bytes);
    }
    un_stream input[UN_MAX_RANKS], output[UN_MAX_RANKS];
    un_view in_views[UN_MAX_RANKS], out_views[UN_MAX_RANKS];
    for (int i = 0; i < here->count; i++) {
        input[i] = stream_of(&gives[here->ranks[i]], 1, &in_views[i]);
        output[i] = stream_of(&takes[here->ranks[i]], 1, &out_views[i]);
    }
    un_status status = run_inside(l, UN_ALL_TO_ALL, 0, input, output);
    if (!status) status = land(l, &b);
    settle_batch(l, &b);
    return status;
}

/* -- all_gather ----------------------------------------------------------------------------------------- */

static piece slice_of(piece whole, size_t offset, size_t bytes) {
    if (offset >= whole.bytes) return (piece){whole.data, 0};
    return (piece){whole.data + offset, least(bytes, whole.bytes - offset)};
}

/* Whose rows the index-th rank of this host hands on to the others of it: its own, then those that it
 * hears of. How many; `pieces` are the slices of their rows. */
static size_t slices_heard_by(const spread *s, int index, const piece *rows, size_t offset, size_t bytes,
                              int *ranks, piece *pieces) {
    const host *here = &s->host[s->mine];
    size_t count = 0;
    ranks[count++] = here->ranks[index];
    for (int h = 0; h < s->hosts; h++)
        for (int i = index; h != s->mine && i < s->host[h].count; i += here->count)
            ranks[count++] = s->host[h].ranks[i];
    for (size_t i = 0; i < count; i++) pieces[i] = slice_of(rows[ranks[i]], offset, bytes);
    return count;
}

/* Our own row is in its place. */
static un_status gather_slices(lane_call *l, const piece *rows, size_t offset, batch *b) {
    const spread *s = l->s;
    int here = s->host[s->mine].count, ranks[UN_MAX_RANKS];
    un_status status = land(l, b);
    if (status) return status;
    un_stream output[UN_MAX_RANKS];
    un_view views[UN_MAX_RANKS];
    piece pieces[UN_MAX_RANKS];
    size_t used = 0;
    for (int index = 0; index < here; index++) {
        size_t count = slices_heard_by(s, index, rows, offset, ROW_BYTES, ranks, pieces);
        output[index] = stream_of(pieces, count, views + used);
        used += count;
    }
    return run_inside(l, UN_ALL_GATHER, 0, &output[s->index], output);
}

static void exchange_slices(lane_call *l, const piece *rows, size_t offset, batch *b) {
    const spread *s = l->s;
    int ranks[UN_MAX_RANKS];
    piece pieces[UN_MAX_RANKS];
    size_t count = slices_heard_by(s, s->index, rows, offset, ROW_BYTES, ranks, pieces);
    for (size_t i = 1; i < count; i++) want(l, b, ranks[i], pieces[i].data, pieces[i].bytes);
    for (int step = 1; step < s->hosts; step++)
        give(l, b, mate_on(s, (s->mine + step) % s->hosts), pieces[0].data, pieces[0].bytes);
}

static un_status gather_rows(lane_call *l, const piece *rows) {
    size_t longest = 0;
    for (int rank = 0; rank < l->g->ranks; rank++)
        longest = rows[rank].bytes > longest ? rows[rank].bytes : longest;
    size_t chunks = (longest + ROW_BYTES - 1) / ROW_BYTES;
    batch batches[DEPTH] = {0};
    un_status status = UN_OK;
    for (size_t time = 0; !status && time < chunks + AHEAD; time++) {
        if (time < chunks) exchange_slices(l, rows, time * ROW_BYTES, &batches[time % DEPTH]);
        size_t past = time - AHEAD;
        if (time >= AHEAD) status = gather_slices(l, rows, past * ROW_BYTES, &batches[past % DEPTH]);
    }
    for (int i = 0; i < DEPTH; i++) settle_batch(l, &batches[i]);
    return status;
}

/* -- broadcast: from host to host, chunk by chunk -------------------------------------------------------- */

static un_status run_chain(lane_call *l, piece whole, int root) {
    const spread *s = l->s;
    int first = s->host_of[root], at = (s->mine - first + s->hosts) % s->hosts;
    int before = (s->mine + s->hosts - 1) % s->hosts, after = (s->mine + 1) % s->hosts;
    int entry = s->index_of[root]; /* the rank of each host that has it first */
    bool mine = s->index == entry % s->host[s->mine].count;
    size_t chunks = (whole.bytes + CHAIN_BYTES - 1) / CHAIN_BYTES;
    batch come = {0}, gone = {0};
    un_status status = UN_OK;
    for (size_t time = 0; !status && time < chunks + 1; time++) {
        piece next = slice_of(whole, time * CHAIN_BYTES, CHAIN_BYTES);
        piece now = slice_of(whole, (time ? time - 1 : 0) * CHAIN_BYTES, time ? CHAIN_BYTES : 0);
        if (mine && time) status = land(l, &come);
        if (mine && at && time < chunks)
            want(l, &come, s->host[before].ranks[entry % s->host[before].count], next.data, next.bytes);
        if (status || !time) continue;
        if (mine && at + 1 < s->hosts)
            give(l, &gone, s->host[after].ranks[entry % s->host[after].count], now.data, now.bytes);
        un_view view;
        un_stream stream = stream_of(&now, 1, &view);
        status = run_inside(l, UN_BROADCAST, entry % s->host[s->mine].count, &stream, &stream);
    }
    if (!status) status = land(l, &gone);
    settle_batch(l, &come);
    settle_batch(l, &gone);
    return status;
}

/* -- reduce_scatter -------------------------------------------------------------------------------------- */

typedef struct scatter { /* one reduce_scatter */
    lane_call *l;
    host_arithmetic a;
    const piece *rows;
    piece to;
    size_t step;                /* of a row, in a chunk */
    char *wide, *sums, *theirs; /* of DEPTH chunks each, but for `wide` */
    size_t sum_bytes, row_bytes;
    batch batches[DEPTH];
} scatter;

static size_t wide_bytes_of(const scatter *r, size_t bytes) {
    return bytes / r->a.item_bytes * r->a.wide_bytes;
}

static char *sums_of(const scatter *r, size_t chunk) { return r->sums + chunk % DEPTH * r->sum_bytes; }

static char *theirs_for(const scatter *r, size_t chunk, int host) {
    return r->theirs + (chunk % DEPTH * (size_t)r->l->s->hosts + (size_t)host) * r->row_bytes;
}

/* Each rank combines, inside its host, the rows of those that it would hear of, and sends them there. */
static un_status begin_scatter(scatter *r, size_t chunk) {
    lane_call *l = r->l;
    const spread *s = l->s;
    size_t offset = chunk * r->step, used = 0, total = 0, sums = 0;
    int ranks[UN_MAX_RANKS];
    un_stream input[UN_MAX_RANKS], output;
    un_view views[UN_MAX_RANKS], view;
    piece pieces[UN_MAX_RANKS];
    for (int index = 0; index < s->host[s->mine].count; index++) {
        size_t heard = slices_heard_by(s, index, r->rows, offset, r->step, ranks, pieces);
        for (size_t i = 0; i < heard; i++) {
            size_t items = pieces[i].bytes / r->a.item_bytes;
            if (r->wide) {
                convert(r->a.widen, r->wide + total, pieces[i].data, items);
                pieces[i].data = r->wide + total;
            }
            pieces[i].bytes = items * r->a.wide_bytes;
            total += pieces[i].bytes;
        }
        input[index] = stream_of(pieces, heard, views + used);
        used += heard;
        if (index == s->index) sums = input[index].bytes;
    }
    output = stream_of(&(piece){sums_of(r, chunk), sums}, 1, &view);
    batch *b = &r->batches[chunk % DEPTH];
    size_t own = wide_bytes_of(r, slice_of(r->to, offset, r->step).bytes);
    for (int h = 0; h < s->hosts; h++)
        if (h != s->mine) want(l, b, mate_on(s, h), theirs_for(r, chunk, h), own);
    un_status status = run_inside(l, UN_REDUCE_SCATTER, 0, input, &output);
    size_t count = slices_heard_by(s, s->index, r->rows, offset, r->step, ranks, pieces);
    char *at = sums_of(r, chunk) + own;
    for (size_t i = 1; !status && i < count; i++) {
        size_t bytes = wide_bytes_of(r, pieces[i].bytes);
        give(l, b, ranks[i], at, bytes);
        at += bytes;
    }
    return status;
}

static un_status finish_scatter(scatter *r, size_t chunk) {
    const spread *s = r->l->s;
    piece mine = slice_of(r->to, chunk * r->step, r->step);
    un_status status = land(r->l, &r->batches[chunk % DEPTH]);
    if (status || !mine.bytes) return status;
    char *own = sums_of(r, chunk);
    const void *by_host[UN_MAX_RANKS];
    for (int h = 0; h < s->hosts; h++) by_host[h] = h == s->mine ? own : theirs_for(r, chunk, h);
    r->a.second.run(r->a.narrow ? own : mine.data, by_host, s->hosts,
                    wide_bytes_of(r, mine.bytes) / r->a.second.unit, r->a.divisor);
    if (r->a.narrow) convert(r->a.narrow, mine.data, own, mine.bytes / r->a.item_bytes);
    return UN_OK;
}

static un_status scatter_sums(lane_call *l, const piece *rows, piece to) {
    const spread *s = l->s;
    scatter r = {.l = l, .a = arithmetic_of(l->g, l->x->call), .rows = rows, .to = to};
    size_t longest = 0, heard = 1;
    for (int rank = 0; rank < l->g->ranks; rank++) {
        longest = rows[rank].bytes > longest ? rows[rank].bytes : longest;
        heard += is_heard_here(l->g, rank);
    }
    r.step = least(ROW_BYTES / r.a.item_bytes * r.a.item_bytes, longest);
    r.row_bytes = round_up(wide_bytes_of(&r, r.step), LINE_BYTES);
    r.sum_bytes = heard * r.row_bytes;
    if (r.a.widen) r.wide = scratch(l, 0, (size_t)l->g->ranks * r.row_bytes);
    r.sums = scratch(l, 1, DEPTH * r.sum_bytes);
    r.theirs = scratch(l, 2, DEPTH * (size_t)s->hosts * r.row_bytes);
    if (status_from_abort(l->g)) return fail_from_abort(l->g);
    l->inner.dtype = r.a.dtype;
    l->inner.reduction = r.a.inside;
    size_t chunks = longest ? (longest + r.step - 1) / r.step : 0;
    un_status status = UN_OK;
    for (size_t time = 0; !status && time < chunks + AHEAD; time++) {
        if (time < chunks) status = begin_scatter(&r, time);
        if (!status && time >= AHEAD) status = finish_scatter(&r, time - AHEAD);
    }
    for (int i = 0; i < DEPTH; i++) settle_batch(l, &r.batches[i]);
    return status;
}

/* -- strict order: everybody's elements come together in one rank ------------------------------------------ */

/* Combine a row from each rank, in rank order, into `to`. */
static un_status combine_strictly(lane_call *l, const piece *gives, piece to) {
    execution *x = l->x;
    int ranks = l->g->ranks;
    char *rows = scratch(l, 0, (size_t)ranks * to.bytes);
    if (status_from_abort(l->g)) return fail_from_abort(l->g);
    piece takes[UN_MAX_RANKS];
    const void *sources[UN_MAX_RANKS];
    for (int rank = 0; rank < ranks; rank++) {
        takes[rank] = (piece){rows + (size_t)rank * to.bytes, to.bytes};
        sources[rank] = takes[rank].data;
    }
    un_status status = move_pairs(l, gives, takes);
    if (!status && to.bytes)
        x->reducer.run(to.data, sources, ranks, to.bytes / x->reducer.unit, x->call->factor);
    return status;
}

static un_status reduce_strictly(lane_call *l, const char *in, char *out, size_t bytes, int root) {
    int ranks = l->g->ranks, me = l->g->rank;
    size_t item = (l->x->call->dtype >> 8 & 0xff) / 8, step = STRICT_BYTES / item * item;
    un_status status = UN_OK;
    for (size_t offset = 0; !status && offset < bytes; offset += step) {
        size_t some = least(step, bytes - offset), items = some / item;
        piece gives[UN_MAX_RANKS], rows[UN_MAX_RANKS];
        char *result = root < 0 || root == me ? out + offset : NULL;
        for (int rank = 0; rank < ranks; rank++) {
            size_t begin = cut(items, (size_t)ranks, (size_t)rank) * item;
            size_t end = cut(items, (size_t)ranks, (size_t)rank + 1) * item;
            gives[rank] = (piece){(char *)(uintptr_t)in + offset + begin, end - begin};
            rows[rank] = (piece){result ? result + begin : NULL, end - begin};
        }
        piece mine = rows[me];
        if (root >= 0) mine.data = scratch(l, 3, mine.bytes);
        status = combine_strictly(l, gives, mine);
        if (!status && root < 0) status = gather_rows(l, rows);
        if (status || root < 0) continue;
        for (int rank = 0; rank < ranks; rank++) {
            gives[rank] = rank == root ? mine : (piece){mine.data, 0};
            if (root != me) rows[rank].bytes = 0;
        }
        status = move_pairs(l, gives, rows);
    }
    return status;
}

/* -- the whole ------------------------------------------------------------------------------------------- */

/* Both sides in one piece each: where a tensor is not, a copy of it is. */
typedef struct sides {
    piece *pieces; /* of input, then of output */
    char **copies;
    size_t inputs, outputs;
} sides;

static bool flatten(const un_stream *s, piece *p, char **copied, bool reads) {
    char *direct = s->bytes ? stream_direct(s, 0, s->bytes) : NULL;
    *p = (piece){direct, s->bytes};
    if (direct || !s->bytes) return true;
    if (!(p->data = *copied = malloc(s->bytes))) return false;
    if (reads) stream_read(p->data, s, 0, s->bytes);
    return true;
}

/* What this rank reads and writes. */
static void count_sides(const lane_call *l, sides *t) {
    un_operation o = l->x->call->operation;
    size_t ranks = (size_t)l->g->ranks;
    bool is_root = l->x->call->root == l->g->rank;
    bool reads = o == UN_SCATTER || o == UN_BROADCAST ? is_root : true;
    bool writes = o == UN_GATHER || o == UN_REDUCE ? is_root : o != UN_BROADCAST || !is_root;
    t->inputs = !reads ? 0 : un_is_wide_input(o) ? ranks : 1;
    t->outputs = !writes ? 0 : un_is_wide_output(o) ? ranks : 1;
}

static bool flatten_sides(lane_call *l, sides *t) {
    const un_call *call = l->x->call;
    count_sides(l, t);
    t->pieces = calloc(t->inputs + t->outputs, sizeof *t->pieces);
    t->copies = calloc(t->inputs + t->outputs, sizeof *t->copies);
    bool made = t->pieces && t->copies;
    for (size_t i = 0; made && i < t->inputs; i++)
        made = flatten(&call->input[i], &t->pieces[i], &t->copies[i], true);
    for (size_t i = 0; made && i < t->outputs; i++) {
        size_t at = t->inputs + i;
        made = flatten(&call->output[i], &t->pieces[at], &t->copies[at], false);
    }
    return made;
}

static void write_back(const lane_call *l, const sides *t, un_status status) {
    for (size_t i = 0; !status && i < t->outputs; i++) {
        const un_stream *to = &l->x->call->output[i];
        if (t->copies[t->inputs + i]) stream_write(to, 0, t->copies[t->inputs + i], to->bytes, false);
    }
}

/* In place, what goes out may be overwritten by what comes in: then it goes out from a copy. */
static bool part_sides(sides *t) {
    for (size_t i = 0; i < t->inputs; i++)
        for (size_t o = 0; o < t->outputs; o++) {
            piece *in = &t->pieces[i], *out = &t->pieces[t->inputs + o];
            bool apart = in->data + in->bytes <= out->data || out->data + out->bytes <= in->data;
            if (apart || !in->bytes || !out->bytes || t->copies[i]) continue;
            if (!(t->copies[i] = malloc(in->bytes))) return false;
            in->data = memcpy(t->copies[i], in->data, in->bytes);
        }
    return true;
}

static un_status move_sides(lane_call *l, sides *t) {
    const un_call *call = l->x->call;
    un_group *g = l->g;
    piece *in = t->pieces, *out = t->pieces + t->inputs;
    piece gives[UN_MAX_RANKS] = {0}, takes[UN_MAX_RANKS] = {0};
    switch (call->operation) {
    case UN_ALL_REDUCE:
    case UN_REDUCE:
        return (l->s->is_strict ? reduce_strictly : reduce_in_lanes)(
            l, in->data, t->outputs ? out->data : NULL, in->bytes,
            call->operation == UN_REDUCE ? call->root : -1);
    case UN_BROADCAST: return run_chain(l, *t->pieces, call->root);
    case UN_REDUCE_SCATTER:
        return l->s->is_strict ? combine_strictly(l, in, *out) : scatter_sums(l, in, *out);
    case UN_GATHER:
        gives[call->root] = *in;
        memcpy(takes, out, t->outputs * sizeof *out);
        break;
    case UN_SCATTER:
        memcpy(gives, in, t->inputs * sizeof *in);
        takes[call->root] = *out;
        break;
    case UN_ALL_TO_ALL:
        if (!part_sides(t)) return UN_NO_MEMORY;
        memcpy(gives, in, t->inputs * sizeof *in);
        memcpy(takes, out, t->outputs * sizeof *out);
        break;
    default: /* all_gather */
        if (in->bytes && in->data != out[g->rank].data) memmove(out[g->rank].data, in->data, in->bytes);
        return gather_rows(l, out);
    }
    return move_pairs(l, gives, takes);
}

un_status run_lanes(execution *x) {
    un_group *g = x->g;
    lane_call l = {.x = x, .g = g, .s = g->spread};
    memset(l.s->given, 0, (size_t)g->ranks * sizeof *l.s->given);
    memset(l.s->taken, 0, (size_t)g->ranks * sizeof *l.s->taken);
    prepare_to_block(&x->patience);
    if (!x->patience.deadline_ns)
        x->patience.deadline_ns = clock_ns() + x->patience.call->timeout_ns;
    l.inner = (un_call){.dtype = x->call->dtype,
                        .factor = x->call->factor,
                        .pause = x->patience.call->pause,
                        .argument = x->patience.call->argument};
    sides t = {0};
    begin_attending();
    un_status status = flatten_sides(&l, &t) ? move_sides(&l, &t) : UN_NO_MEMORY;
    end_attending();
    write_back(&l, &t, status);
    for (size_t i = 0; t.copies && i < t.inputs + t.outputs; i++) free(t.copies[i]);
    free(t.copies);
    free(t.pieces);
    if (status && !status_from_abort(g)) fail(g, status, g->rank);
    return status;
}
