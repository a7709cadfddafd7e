// genmc: --check-liveness
/* Rank 2 is on another host. Rank 0 hears from it, and writes its descriptor into its mirror on this host; rank 1
 * waits for that descriptor, and sleeps where it comes too early.
 *
 * deliver, receive, mirror_post, publish_mirror, await_flag, sleep_for: as between ranks of one host, nobody
 * sleeps through it, and whoever wakes up reads what was posted. */
#define RANKS 3
#include "model.h"

#include "base/system.c"
#include "base/wait.c"
#include "hosts/hosts.c"
#include "hosts/posts.c"

static uint8_t where[2][RANKS] = {{HERE, HERE, HEARD}, {HERE, HERE, ELSEWHERE}};
static hosts known[2]; /* by ranks 0 and 1 */
static rank_of_hosts of[2][RANKS];
static const un_call call = {.timeout_ns = INT64_MAX / 2};

static void attend(bool begins) {}

static void open_hosts(int rank) {
    hosts *hs = &known[rank];
    hs->group = &ranks[rank];
    hs->of = of[rank];
    hs->reach.where = where[rank], hs->reach.attend = attend;
    ranks[rank].reach = &hs->reach;
}

static void *hear(void *argument) {
    char payload = 7;
    wire head = {.kind = WIRE_POSTS, .from = 2, .number = 1, .extra = 2 << RANK_SHIFT | 1 << FLAG_BITS};
    deliver(&head, &payload, 1, NULL);
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
    for (int rank = 0; rank < 2; rank++) open_hosts(rank);
    all.first = &known[0];
    pthread_t hears, waits;
    pthread_create(&hears, NULL, hear, &ranks[0]);
    pthread_create(&waits, NULL, wait_for_post, &ranks[1]);
    pthread_join(hears, NULL);
    pthread_join(waits, NULL);
    return 0;
}
