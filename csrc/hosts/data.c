/* Data between hosts.
 *
 * Data between two ranks is numbered in program order, which is the same on both. What arrives
 * early waits; long data stays with its sender until it is wanted.
 */
#include <stdlib.h>

#include "hosts/lanes.h"

enum {
    SETTLING_NS = 1000 * 1000 * 1000,
    LAST_LOOKS = 100, /* so much later; time passes, too, while this process is stopped */
};
static const int64_t RELEASING_NS = (int64_t)3 * SETTLING_NS;

struct flight {          /* what a call sends or receives */
    flight *next;        /* of its chunk and stage */
    flight *next_wanted; /* of those that wait for data */
    transfer transfer;
    int peer;
    uint64_t number;
    row to; /* of a wanted one */
};

bool receive_data(hosts *hs, const wire *head, const void *data, size_t bytes,
                  remote_data *remote) {
    for (flight **link = &hs->wanted; *link; link = &(*link)->next_wanted) {
        flight *f = *link;
        if (f->peer != head->from || f->number != head->number) continue;
        *link = f->next_wanted;
        bool fits = bytes == f->to.bytes;
        if (fits && remote) {
            fetch_to(remote, f->to.data, bytes, &f->transfer);
            return true;
        }
        if (fits) memcpy(f->to.data, data, bytes);
        atomic_store(&f->transfer.state, fits ? HAS_LANDED : IS_BROKEN); /* or it is waited for */
        if (!fits) abort_group(hs->group, UN_DAMAGED, f->peer, 0);
        return false;
    }
    parcel *p = keep_parcel(head, data, bytes, remote);
    if (p) push_parcel(&hs->early, p);
    return p != NULL;
}

static flight *new_flight(lane_call *l, int peer, row data, uint32_t *count) {
    flight *f = data.bytes ? calloc(1, sizeof *f) : NULL;
    if (data.bytes && !f) abort_group(l->g, UN_ABORTED, l->g->rank, l->x->number);
    if (!f) return NULL;
    f->peer = peer;
    f->number = l->x->number << 24 | (uint64_t)((*count)++ & 0xffffff);
    f->to = data;
    f->transfer.link = link_of(l->g, peer);
    f->next = *l->now;
    return *l->now = f;
}

void give(lane_call *l, int peer, row data) {
    flight *f = new_flight(l, peer, data, &l->hosts->of[peer].given);
    if (!f) return;
    wire head = wire_of(l->g, WIRE_DATA);
    head.number = f->number;
    send_from(f->transfer.link, &head, data.data, data.bytes, &f->transfer);
}

void want(lane_call *l, int peer, row to) {
    hosts *hs = l->hosts;
    flight *f = new_flight(l, peer, to, &hs->of[peer].taken);
    if (!f) return;
    lock_network();
    f->next_wanted = hs->wanted;
    hs->wanted = f;
    parcel *p = find_parcel(&hs->early, peer, f->number);
    if (p && receive_data(hs, &p->head, p->data, p->bytes, p->remote)) p->remote = NULL;
    if (p) drop_parcel(p);
    unlock_network();
}

un_status land(lane_call *l, flight **flights) {
    for (flight *f; (f = *flights);) {
        uint32_t seen = network_rounds();
        if (atomic_load(&f->transfer.state) != HAS_LANDED) drive_network();
        if (atomic_load(&f->transfer.state) == HAS_LANDED) {
            *flights = f->next;
            free(f);
            continue;
        }
        un_status status = look_after(l->g, &l->x->patience, f->peer);
        if (status) return status;
        await_network(seen, SLICE_NS);
    }
    return UN_OK;
}

/* UCX releases what it still holds when its link is cut: then a peer is stopped, or gone. If it does
 * not, it goes, with all that other groups of this process have on the network. */
void await_end(transfer *t) {
    int64_t end = clock_ns() + SETTLING_NS;
    for (int looks = 0; atomic_load(&t->state) == UNDER_WAY_YET;) {
        uint32_t seen = network_rounds();
        int64_t late_ns = clock_ns() - end;
        if (late_ns > 0) break_link(t->link);
        if (late_ns > RELEASING_NS && looks++ > LAST_LOOKS) give_up_network();
        if (!network_is_open())
            atomic_store(&t->state, IS_BROKEN);
        else if (!drive_network() && atomic_load(&t->state) == UNDER_WAY_YET)
            await_network(seen, 1000 * 1000);
    }
}

static void end_flight(hosts *hs, flight *f) {
    lock_network();
    for (flight **link = &hs->wanted; *link; link = &(*link)->next_wanted)
        if (*link == f) {
            *link = f->next_wanted;
            atomic_store(&f->transfer.state, IS_BROKEN);
            break;
        }
    unlock_network();
    await_end(&f->transfer);
    free(f);
}

void end_flights(lane_call *l) {
    bool is_first = true;
    for (int i = 0; i < STAGES * DEPTH; i++)
        for (flight *f; (f = l->flights[i]); is_first = false) {
            if (is_first) release_data(l->hosts); /* our peers may wait for that */
            l->flights[i] = f->next;
            end_flight(l->hosts, f);
        }
}
