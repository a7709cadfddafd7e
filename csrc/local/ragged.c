/* Gathering data whose length only its owner knows, in one meeting.
 *
 * Every rank posts a head, all of the same length, and writes its tail next to it in the descriptor
 * or, if there is no room, into its first slot. After the meeting the heads say how long the tails
 * are; the caller allocates room for them and copies them from there. That needs no step, and no
 * rank waits for it: descriptor and slot are rewritten two calls later, and no rank can get that
 * far before we reach the next call.
 */
#include "local/call.h"
#include "base/segment.h"
#include "base/stream.h"

static const uint64_t HEADS = 0x68656164; /* marks such a call: error_texts.py */

static const un_ragged *ragged_of(const execution *x) {
    return (const un_ragged *)x->patience.call;
}

static size_t room_beside(const un_group *g, size_t head_bytes) {
    return g->described_most - round_up(head_bytes, 16);
}

size_t un_group_most_along(const un_group *g) {
    return g->reach ? room_beside(g, UN_HEAD_BYTES) : UN_MOST_ALONG;
}

static char *tail_address(const execution *x, int rank, size_t bytes) {
    size_t head_bytes = ragged_of(x)->head.bytes;
    if (bytes > room_beside(x->g, head_bytes)) return slot_of(x->g, rank, x->number, 0);
    return descriptor_of(x->g, rank, x->number)->payload + round_up(head_bytes, 16);
}

static void bring_head_and_tail(execution *x, size_t step) {
    (void)step; /* there is one */
    const un_ragged *r = ragged_of(x);
    stream_read(descriptor_of(x->g, x->g->rank, x->number)->payload, &r->head, 0, r->head.bytes);
    if (r->comes_along)
        stream_read(tail_address(x, x->g->rank, r->tail.bytes), &r->tail, 0, r->tail.bytes);
}

static void take_tails(execution *x, const un_stream *to) {
    for (int rank = 0; rank < x->g->ranks; rank++) {
        if (rank == x->g->rank)
            copy_own(x, &to[rank], &ragged_of(x)->tail, 0, to[rank].bytes);
        else if (to[rank].bytes)
            stream_write(&to[rank], 0, tail_address(x, rank, to[rank].bytes), to[rank].bytes,
                         false);
    }
}

un_status gather_ragged(execution *x) {
    const un_ragged *r = ragged_of(x);
    un_call heads = r->call;
    heads.operation = UN_ALL_GATHER;
    heads.dtype = un_dtype_of(UN_UINT, 8, 1);
    heads.input = &r->head;
    heads.output = r->heads;
    x->call = &heads;
    un_status status = plan_execution(x);
    heads.operation = r->call.operation; /* heads go to every rank, but the operation is compared */
    x->hash = HEADS;
    x->bring = bring_head_and_tail;
    x->payload_bytes = round_up(r->head.bytes, 16) + (r->comes_along ? r->tail.bytes : 0);
    if (!status && r->comes_along && r->tail.bytes > room_beside(x->g, r->head.bytes))
        status = prepare_slice(x->g);
    status = post_and_meet(x, status);
    x->call = &r->call;
    const un_stream *tails = status ? NULL : r->open(r);
    if (tails) take_tails(x, tails);
    return status;
}
