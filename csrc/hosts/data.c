/* Data between hosts.
 *
 * Data between two ranks is numbered in program order, which is the same on both. What arrives
 * early waits; long data stays with its sender until it is wanted.
 */
#include <stdlib.h>

#include "hosts/data.h"

enum { SETTLING_NS = 1000 * 1000 * 1000 };

struct wanted { /* data that has not arrived yet */
    struct wanted *next;
    int from;
    uint64_t number;
    char *to;
    size_t bytes;
    transfer *transfer;
};

typedef struct flight { /* what one call sends or receives */
    struct flight *next;
    transfer transfer;
    struct wanted wanted;
    int peer;
    bool is_wanted; /* is in the list */
} flight;

/* With the network's lock: wanted data has arrived. */
static bool fill_wanted(hosts *hs, const struct wanted *w, const void *data, size_t bytes,
                        remote_data *remote) {
    if (bytes != w->bytes) {
        atomic_store(&w->transfer->state, IS_BROKEN); /* or the call would wait for it, even then */
        abort_group(hs->group, UN_DAMAGED, w->from, 0);
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

bool receive_data(hosts *hs, const wire *head, const void *data, size_t bytes,
                  remote_data *remote) {
    for (struct wanted **link = &hs->wanted; *link; link = &(*link)->next) {
        struct wanted *w = *link;
        if (w->from != head->from || w->number != head->number) continue;
        *link = w->next;
        ((flight *)(void *)((char *)w - offsetof(flight, wanted)))->is_wanted = false;
        return fill_wanted(hs, w, data, bytes, remote);
    }
    parcel *p = keep_parcel(head, data, bytes, remote);
    if (p) push_parcel(&hs->early, p);
    return p != NULL;
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

void give(lane_call *l, batch *b, int peer, const void *data, size_t bytes) {
    flight *f = bytes ? new_flight(l, b, peer) : NULL;
    if (!f) return;
    wire head = wire_of(l->g, WIRE_DATA);
    head.number = data_number(l, &l->hosts->of[peer].given);
    send_from(f->transfer.link, &head, data, bytes, &f->transfer);
}

void want(lane_call *l, batch *b, int peer, void *to, size_t bytes) {
    flight *f = bytes ? new_flight(l, b, peer) : NULL;
    if (!f) return;
    hosts *hs = l->hosts;
    f->wanted = (struct wanted){.from = peer,
                                .number = data_number(l, &hs->of[peer].taken),
                                .to = to,
                                .bytes = bytes,
                                .transfer = &f->transfer};
    lock_network();
    parcel *p = find_parcel(&hs->early, peer, f->wanted.number);
    if (p) {
        if (fill_wanted(hs, &f->wanted, p->data, p->bytes, p->remote)) p->remote = NULL;
        drop_parcel(p);
    } else {
        f->is_wanted = true;
        f->wanted.next = hs->wanted;
        hs->wanted = &f->wanted;
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

un_status land(lane_call *l, batch *b) {
    for (flight *f; (f = b->first);) {
        un_status status = await_flight(l, f);
        if (status) return status;
        b->first = f->next;
        free(f);
    }
    return UN_OK;
}

/* UCX releases what it still holds when its link is cut: then a peer is stopped, or gone. */
void await_end(transfer *t) {
    int64_t end = clock_ns() + SETTLING_NS;
    while (atomic_load(&t->state) == UNDER_WAY_YET) {
        uint32_t seen = network_rounds();
        if (clock_ns() > end) break_link(t->link);
        if (!drive_network() && atomic_load(&t->state) == UNDER_WAY_YET)
            await_network(seen, 1000 * 1000);
    }
}

void end_batch(lane_call *l, batch *b) {
    if (!b->first) return;
    release_data(l->hosts); /* before we wait for others, which may wait for that */
    lock_network();
    for (flight *f = b->first; f; f = f->next) {
        if (!f->is_wanted) continue;
        struct wanted **link = &l->hosts->wanted;
        while (*link != &f->wanted) link = &(*link)->next;
        *link = f->wanted.next;
        atomic_store(&f->transfer.state, IS_BROKEN);
    }
    unlock_network();
    for (flight *f; (f = b->first); free(f)) {
        await_end(&f->transfer);
        b->first = f->next;
    }
}
