/* The pipeline of a large call: chunks go through its stages, several at a time, so that while one
 * crosses the network another is combined or shared inside the host. */
#include <stdlib.h>

#include "hosts/lanes.h"

enum { GRACE_NS = 500 * 1000 * 1000 }; /* for our host: who waits for another host knows more */

un_status run_pipeline(lane_call *l, void *operation, size_t chunks, const lane_stage *stages,
                       int count) {
    un_status status = UN_OK;
    size_t end = chunks ? chunks + stages[count - 1].behind : 0;
    for (size_t time = 0; !status && time < end; time++)
        for (int i = 0; !status && i < count; i++) {
            size_t chunk = time - stages[i].behind;
            if (chunk >= chunks) continue; /* or its turn has not come */
            l->now = &l->flights[(size_t)i * DEPTH + chunk % DEPTH];
            status = i ? land(l, l->now - DEPTH) : UN_OK;
            if (!status) status = land(l, l->now); /* of DEPTH chunks ago */
            if (!status) status = stages[i].run(operation, chunk);
        }
    for (int i = 0; !status && i < STAGES * DEPTH; i++) status = land(l, &l->flights[i]);
    end_flights(l);
    return status;
}

/* -- inside a host --------------------------------------------------------------------------------- */

void add_row(streams *s, int index, row part) {
    while (s->begun <= index) s->stream[s->begun++] = (un_stream){.views = s->views + s->used};
    un_stream *to = &s->stream[index];
    s->views[s->used++] = (un_view){.data = part.data, .bytes = part.bytes, .start = to->bytes};
    to->bytes += part.bytes;
    to->count++;
}

/* A call of the inner group. If it fails, so does this call. */
un_status run_inside(lane_call *l, un_operation operation, int root, const un_stream *input,
                     const un_stream *output) {
    un_group *g = l->g, *inner = l->hosts->inner;
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
    int rank = f.rank >= 0 && f.rank < l->here->count ? l->here->ranks[f.rank] : -1;
    if (!status_from_abort(g)) { /* the outer group reports the cause, as soon as it knows it */
        if (status == UN_INTERRUPTED) return interrupt(g, l->x->number);
        abort_group(g, status, rank, l->x->number);
    }
    return fail_from_abort(g);
}

char *scratch(lane_call *l, int which, size_t bytes) {
    hosts *hs = l->hosts;
    if (hs->scratch_bytes[which] < bytes) {
        free(hs->scratch[which]);
        hs->scratch[which] = aligned_alloc(LINE_BYTES, round_up(bytes, LINE_BYTES));
        hs->scratch_bytes[which] = hs->scratch[which] ? bytes : 0;
    }
    if (bytes && !hs->scratch[which]) abort_group(l->g, UN_NO_MEMORY, l->g->rank, l->x->number);
    return hs->scratch[which];
}

/* -- rows ------------------------------------------------------------------------------------------- */

row slice_of(row whole, size_t chunk, size_t bytes) {
    size_t offset = least(chunk * bytes, whole.bytes);
    return (row){whole.data + offset, least(bytes, whole.bytes - offset)};
}

size_t chunks_of(size_t bytes, size_t chunk) { return chunk ? (bytes + chunk - 1) / chunk : 0; }
