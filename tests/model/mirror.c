// genmc: --check-liveness
/* Rank 2 is on another host. Rank 0 hears from it, and writes its descriptor into its mirror on this host; rank 1
 * waits for that descriptor, and sleeps where it comes too early.
 *
 * deliver_wire, receive, mirror_descriptor, publish_mirror, await_flag, sleep_for: as between ranks of one host, nobody
 * sleeps through it, and whoever wakes up reads what was posted. */
#define RANKS 3
#include "model.h"

#include "hosts.c"
#include "wait.c"

void begin_attending(void) {}
void end_attending(void) {}

static int host_of[RANKS] = {0, 0, 1}, index_of[RANKS] = {0, 1, 0}, everybody[RANKS] = {0, 1, 2};
static host hosts[2];
static spread spreads[2];
static const un_call call = {.timeout_ns = INT64_MAX / 2};

static void open_spread(int rank) {
    spread *s = &spreads[rank];
    s->group = &ranks[rank];
    s->hosts = 2, s->index = rank;
    s->host = hosts, s->host_of = host_of, s->index_of = index_of;
    ranks[rank].spread = s;
}

static void *hear(void *argument) {
    char payload = 7;
    wire head = {.kind = WIRE_DESCRIPTOR, .from = 2, .number = 1};
    deliver_wire(&head, &payload, 1, NULL);
    return NULL;
}

static void *wait_for_post(void *argument) {
    un_group *g = argument;
    patience p = {.call = &call};
    descriptor *theirs = descriptor_of(g, 2, 1);
    assert(await_flag(g, 2, &theirs->call, 1, &p) == UN_OK);
    assert(theirs->payload[0] == 7);
    return NULL;
}

int main(void) {
    open_ranks();
    hosts[0].ranks = everybody, hosts[0].count = 2;
    hosts[1].ranks = everybody + 2, hosts[1].count = 1;
    for (int rank = 0; rank < 2; rank++) open_spread(rank);
    all.first = &spreads[0];
    pthread_t hears, waits;
    pthread_create(&hears, NULL, hear, &ranks[0]);
    pthread_create(&waits, NULL, wait_for_post, &ranks[1]);
    pthread_join(hears, NULL);
    pthread_join(waits, NULL);
    return 0;
}
