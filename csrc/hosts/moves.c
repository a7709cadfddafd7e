/* Large calls over hosts that move bytes as they are. */
#include "hosts/lanes.h"

/* -- all_gather: rows cross once, and are shared inside each host ------------------------------------ */

/* Our own row is in place; send a chunk of it to the other hosts, and receive theirs. */
void send_rows(lane_call *l, const row *rows, size_t chunk, size_t bytes) {
    const hosts *hs = l->hosts;
    for (int i = l->begin[hs->index] + 1; i < l->begin[hs->index + 1]; i++)
        want(l, l->ranks[i], slice_of(rows[l->ranks[i]], chunk, bytes));
    for (int step = 1; step < hs->count; step++)
        give(l, rank_on(hs, hs->mine + step, hs->index), slice_of(rows[l->g->rank], chunk, bytes));
}

/* The ranks of this host share what they have received. */
un_status share_rows(lane_call *l, const row *rows, size_t chunk, size_t bytes) {
    streams output;
    no_streams(&output);
    for (int index = 0; index < l->here->count; index++)
        for (int i = l->begin[index]; i < l->begin[index + 1]; i++)
            add_row(&output, index, slice_of(rows[l->ranks[i]], chunk, bytes));
    return run_inside(l, UN_ALL_GATHER, 0, &output.stream[l->hosts->index], output.stream);
}

typedef struct pairs { /* also of an all_gather: whose rows are `takes` */
    lane_call *l;
    const row *gives, *takes;
    size_t chunks;
} pairs;

static un_status send_chunk(void *operation, size_t chunk) {
    const pairs *p = operation;
    send_rows(p->l, p->takes, chunk, ROW_BYTES);
    return UN_OK;
}

static un_status share_chunk(void *operation, size_t chunk) {
    const pairs *p = operation;
    return share_rows(p->l, p->takes, chunk, ROW_BYTES);
}

un_status gather_rows(lane_call *l, const row *rows) {
    pairs p = {.l = l, .takes = rows};
    size_t longest = 0;
    for (int rank = 0; rank < l->g->ranks; rank++)
        longest = rows[rank].bytes > longest ? rows[rank].bytes : longest;
    const lane_stage stages[] = {{send_chunk, 0}, {share_chunk, AHEAD}};
    return run_pipeline(l, &p, chunks_of(longest, ROW_BYTES), stages, 2);
}

/* -- pairs: gather, scatter, all_to_all --------------------------------------------------------------- */

/* What our host's ranks have for each other moves inside, all at once, while the first chunks cross. */
static un_status move_inside(const pairs *p) {
    streams input, output;
    no_streams(&input), no_streams(&output);
    for (int i = 0; i < p->l->here->count; i++) {
        add_row(&input, i, p->gives[p->l->here->ranks[i]]);
        add_row(&output, i, p->takes[p->l->here->ranks[i]]);
    }
    return run_inside(p->l, UN_ALL_TO_ALL, 0, input.stream, output.stream);
}

static un_status move_chunk(void *operation, size_t chunk) {
    const pairs *p = operation;
    un_group *g = p->l->g;
    for (int way = 0; way < 2; way++)
        for (int step = 1; step < g->ranks; step++) {
            int peer = (g->rank + step) % g->ranks;
            if (!is_elsewhere(g, peer)) continue;
            row whole = way ? p->gives[peer] : p->takes[peer];
            (way ? give : want)(p->l, peer, slice_of(whole, chunk, ROW_BYTES));
        }
    return chunk == least(AHEAD, p->chunks - 1) ? move_inside(p) : UN_OK;
}

/* What each rank sends to and receives from each, directly. */
un_status move_pairs(lane_call *l, const row *gives, const row *takes) {
    pairs p = {.l = l, .gives = gives, .takes = takes, .chunks = 1};
    for (int rank = 0; rank < l->g->ranks; rank++) {
        size_t bytes = gives[rank].bytes > takes[rank].bytes ? gives[rank].bytes
                                                             : takes[rank].bytes;
        size_t chunks = is_elsewhere(l->g, rank) ? chunks_of(bytes, ROW_BYTES) : 0;
        p.chunks = chunks > p.chunks ? chunks : p.chunks;
    }
    return run_pipeline(l, &p, p.chunks, &(lane_stage){move_chunk, 0}, 1);
}

/* -- broadcast: from host to host, chunk by chunk -------------------------------------------------------- */

enum { CHAIN_BYTES = 512 * 1024 }; /* of a chunk */

typedef struct chain {
    lane_call *l;
    row whole;
    int entry;         /* which rank of our host gets it first; then it is passed on: */
    int before, after; /* from and to these ranks; -1: none, or not to or by us */
} chain;

static un_status want_chunk(void *operation, size_t chunk) {
    const chain *c = operation;
    row part = slice_of(c->whole, chunk, CHAIN_BYTES);
    if (c->before >= 0) want(c->l, c->before, part);
    return UN_OK;
}

static un_status pass_chunk(void *operation, size_t chunk) {
    const chain *c = operation;
    row part = slice_of(c->whole, chunk, CHAIN_BYTES);
    if (c->after >= 0) give(c->l, c->after, part);
    streams both;
    no_streams(&both);
    add_row(&both, 0, part);
    return run_inside(c->l, UN_BROADCAST, c->entry, both.stream, both.stream);
}

un_status run_chain(lane_call *l, row whole, int root) {
    const hosts *hs = l->hosts;
    int at = (hs->mine - hs->of[root].host + hs->count) % hs->count, index = hs->of[root].index;
    chain c = {.l = l, .whole = whole, .entry = index % l->here->count, .before = -1, .after = -1};
    bool is_entry = hs->index == c.entry;
    if (is_entry && at) c.before = rank_on(hs, hs->mine + hs->count - 1, index);
    if (is_entry && at + 1 < hs->count) c.after = rank_on(hs, hs->mine + 1, index);
    const lane_stage stages[] = {{want_chunk, 0}, {pass_chunk, AHEAD}};
    return run_pipeline(l, &c, chunks_of(whole.bytes, CHAIN_BYTES), stages, 2);
}
