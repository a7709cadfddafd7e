/* Arithmetic in the order of hosts: the ranks of each host in their order, then the hosts in theirs.
 *
 * So for one placement of ranks every element is combined in one order, at every size, by any rank.
 * Sums of half types travel between hosts in float32, and are rounded once at the end; a group that
 * `rounds` sends them as half types, which halves the bytes. A strict group has no host order:
 * every element is combined rank by rank, as on one host.
 */
#include "hosts/hosts.h"

enum { STACK_BYTES = 64 * 1024 };

static bool is_half(un_dtype dtype) {
    return dtype == un_dtype_of(UN_FLOAT, 16, 1) || dtype == un_dtype_of(UN_BFLOAT, 16, 1);
}

host_arithmetic arithmetic_of(const un_group *g, const un_call *call) {
    const hosts *hs = hosts_of(g);
    bool widens = is_half(call->dtype) && !hs->rounds;
    bool averages = un_averages(call->reduction);
    host_arithmetic a = {.dtype = widens ? un_dtype_of(UN_FLOAT, 32, 1) : call->dtype,
                         .item_bytes = (call->dtype >> 8 & 0xff) / 8,
                         .inside = averages ? UN_SUM : call->reduction,
                         .factor = call->factor,
                         .divisor = averages ? g->ranks : 1};
    un_reduction between = averages                            ? (un_reduction)DIVISION
                           : call->reduction == UN_PREMUL_SUM ? UN_SUM
                                                               : call->reduction;
    a.wide_bytes = widens ? sizeof(float) : a.item_bytes;
    a.first = find_reducer(a.dtype, a.inside);
    a.second = find_reducer(a.dtype, between);
    if (widens) {
        a.widen = find_reducer(call->dtype, (un_reduction)WIDENING).run;
        a.narrow = find_reducer(call->dtype, (un_reduction)NARROWING).run;
    }
    return a;
}

void convert(kernel *how, void *to, const void *from, size_t items) {
    how(to, &from, 1, items, 1);
}

/* The contributions lie at `sources`, by rank. */
void combine_in_host_order(execution *x, char *to, const void **sources, size_t bytes) {
    const hosts *hs = hosts_of(x->g);
    host_arithmetic a = arithmetic_of(x->g, x->call);
    _Alignas(64) char memory[STACK_BYTES];
    size_t rows = (size_t)(hs->most + hs->count) + (a.narrow != NULL);
    size_t pitch = STACK_BYTES / rows / 16 * 16, items = bytes / a.item_bytes;
    size_t block = pitch / a.wide_bytes;
    for (size_t done = 0; done < items; done += block) {
        size_t some = items - done < block ? items - done : block;
        size_t units = some * a.wide_bytes / a.first.unit;
        const void *partials[UN_MAX_RANKS], *theirs[UN_MAX_RANKS];
        for (int h = 0; h < hs->count; h++) {
            for (int i = 0; i < hs->host[h].count; i++) {
                theirs[i] = (const char *)sources[hs->host[h].ranks[i]] + done * a.item_bytes;
                char *wide = memory + (size_t)i * pitch;
                if (a.widen) convert(a.widen, wide, theirs[i], some), theirs[i] = wide;
            }
            char *partial = memory + (size_t)(hs->most + h) * pitch;
            a.first.run(partial, theirs, hs->host[h].count, units, a.factor);
            partials[h] = partial;
        }
        char *out = to + done * a.item_bytes;
        char *sum = a.narrow ? memory + (rows - 1) * pitch : out;
        a.second.run(sum, partials, hs->count, some * a.wide_bytes / a.second.unit, a.divisor);
        if (a.narrow) convert(a.narrow, out, sum, some);
    }
}
