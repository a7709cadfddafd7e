/* Large calls over hosts: what a call reads and writes.
 *
 * Ranks of one host combine and share through their inner group; data between hosts is sent directly
 * from memory to memory, and crosses the network once for each host that needs it. Tensors move in
 * chunks, several at a time, see pipeline.c.
 */
#include <stdlib.h>

#include "base/stream.h"
#include "hosts/lanes.h"

/* Both sides, contiguous: where a tensor is not, a copy stands for it. */
typedef struct sides {
    row in[UN_MAX_RANKS], out[UN_MAX_RANKS];
    char *in_copy[UN_MAX_RANKS], *out_copy[UN_MAX_RANKS];
    int inputs, outputs;
} sides;

/* What this rank reads and writes. */
static void count_sides(const lane_call *l, sides *t) {
    un_operation o = l->x->call->operation;
    bool is_root = l->x->call->root == l->g->rank;
    bool reads = o == UN_SCATTER || o == UN_BROADCAST ? is_root : true;
    bool writes = o == UN_GATHER || o == UN_REDUCE ? is_root : o != UN_BROADCAST || !is_root;
    t->inputs = !reads ? 0 : un_is_wide_input(o) ? l->g->ranks : 1;
    t->outputs = !writes ? 0 : un_is_wide_output(o) ? l->g->ranks : 1;
}

static bool flatten(const un_stream *s, row *r, char **copy) {
    char *direct = s->bytes ? stream_direct(s, 0, s->bytes) : NULL;
    *copy = direct || !s->bytes ? NULL : malloc(s->bytes);
    *r = (row){direct ? direct : *copy, s->bytes};
    return r->data || !s->bytes;
}

static bool flatten_sides(const un_call *call, sides *t) {
    bool made = true;
    for (int i = 0; i < t->inputs; i++) {
        made &= flatten(&call->input[i], &t->in[i], &t->in_copy[i]);
        if (t->in_copy[i]) stream_read(t->in_copy[i], &call->input[i], 0, t->in[i].bytes);
    }
    for (int i = 0; i < t->outputs; i++)
        made &= flatten(&call->output[i], &t->out[i], &t->out_copy[i]);
    return made;
}

static void free_sides(const un_call *call, sides *t, un_status status) {
    for (int i = 0; i < t->outputs; i++) {
        if (!status && t->out_copy[i])
            stream_write(&call->output[i], 0, t->out_copy[i], t->out[i].bytes, false);
        free(t->out_copy[i]);
    }
    for (int i = 0; i < t->inputs; i++) free(t->in_copy[i]);
}

/* In place, incoming data may overwrite what is still to be sent: then a copy is sent. */
static bool part_sides(sides *t) {
    for (int i = 0; i < t->inputs; i++)
        for (int o = 0; o < t->outputs; o++) {
            row *in = &t->in[i], *out = &t->out[o];
            bool apart = in->data + in->bytes <= out->data || out->data + out->bytes <= in->data;
            if (apart || !in->bytes || !out->bytes || t->in_copy[i]) continue;
            if (!(t->in_copy[i] = malloc(in->bytes))) return false;
            in->data = memcpy(t->in_copy[i], in->data, in->bytes);
        }
    return true;
}

static un_status move_sides(lane_call *l, sides *t) {
    const un_call *call = l->x->call;
    int root = call->root;
    row in = t->in[0], out = t->out[0], rows[UN_MAX_RANKS] = {0};
    switch (call->operation) {
    case UN_REDUCE: return reduce_tensor(l, in.data, out.data, call->output->bytes, root);
    case UN_ALL_REDUCE: return reduce_tensor(l, in.data, out.data, call->output->bytes, -1);
    case UN_REDUCE_SCATTER: return reduce_rows(l, out);
    case UN_BROADCAST: return run_chain(l, l->g->rank == root ? in : out, root);
    case UN_GATHER: rows[root] = in; return move_pairs(l, rows, t->out);
    case UN_SCATTER: rows[root] = out; return move_pairs(l, t->in, rows);
    case UN_ALL_TO_ALL: return part_sides(t) ? move_pairs(l, t->in, t->out) : UN_NO_MEMORY;
    default: break;
    }
    row *own = &t->out[l->g->rank]; /* of an all_gather */
    if (in.bytes && in.data != own->data) memmove(own->data, in.data, in.bytes);
    return gather_rows(l, t->out);
}

static void find_mates(lane_call *l) {
    int at = 0;
    for (int index = 0; index < l->here->count; index++) {
        l->begin[index] = at;
        l->ranks[at++] = l->here->ranks[index];
        for (int h = 0; h < l->hosts->count; h++)
            for (int i = index; h != l->hosts->mine && i < l->hosts->host[h].count;
                 i += l->here->count)
                l->ranks[at++] = l->hosts->host[h].ranks[i];
    }
    l->begin[l->here->count] = at;
}

un_status run_lanes(execution *x) {
    un_group *g = x->g;
    hosts *hs = hosts_of(g);
    sides *t = calloc(1, sizeof *t);
    lane_call l = {.x = x, .g = g, .hosts = hs, .here = &hs->host[hs->mine]};
    for (int rank = 0; rank < g->ranks; rank++) hs->of[rank].given = hs->of[rank].taken = 0;
    prepare_to_block(&x->patience);
    if (!x->patience.deadline_ns)
        x->patience.deadline_ns = clock_ns() + x->patience.call->timeout_ns;
    l.inner = (un_call){.dtype = x->call->dtype,
                        .factor = x->call->factor,
                        .pause = x->patience.call->pause,
                        .argument = x->patience.call->argument};
    find_mates(&l);
    un_status status = UN_NO_MEMORY;
    attend_network(true);
    if (t) {
        l.given = t->in;
        count_sides(&l, t);
        if (flatten_sides(x->call, t)) status = move_sides(&l, t);
        free_sides(x->call, t, status);
    }
    attend_network(false);
    free(t);
    if (status && !status_from_abort(g)) fail(g, status, g->rank);
    return status;
}
