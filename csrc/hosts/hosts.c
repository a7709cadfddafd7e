/* Groups over hosts: which rank is where, and the mirrors of ranks on other hosts. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>

#include "hosts/hosts.h"
#include "local/messages.h"
#include "base/records.h"
#include "base/watcher.h"

enum {
    UNCLAIMED = 4096, /* parcels for groups not opened here yet */
    CLOSED = 1024,
    BROKEN_NS = 1000 * 1000 * 1000, /* a rank counts as lost so long after its link broke */
};

/* With the network's lock. */
static struct {
    hosts *first;
    parcel_queue unclaimed;
    size_t unclaimed_count;
    uint64_t closed[CLOSED]; /* keys of groups that this process has left, the latest ones */
    size_t closed_count;
} all;

/* -- parcels -------------------------------------------------------------------------------------- */

void push_parcel(parcel_queue *q, parcel *p) {
    p->next = NULL;
    if (!q->first) q->last = &q->first;
    *q->last = p;
    q->last = &p->next;
}

parcel *take_parcel(parcel_queue *q) {
    parcel *p = q->first;
    if (p) q->first = p->next;
    return p;
}

/* The one with this sender and number, if it is there. */
parcel *find_parcel(parcel_queue *q, int from, uint64_t number) {
    for (parcel **link = &q->first; *link; link = &(*link)->next) {
        parcel *found = *link;
        if (found->head.from != from || found->head.number != number) continue;
        *link = found->next;
        for (q->last = &q->first; *q->last;) q->last = &(*q->last)->next;
        return found;
    }
    return NULL;
}

void drop_parcel(parcel *p) {
    drop_remote(p->remote);
    free(p);
}

void drop_parcels(parcel_queue *q) {
    for (parcel *p; (p = take_parcel(q));) drop_parcel(p);
}

parcel *keep_parcel(const wire *head, const void *data, size_t bytes, remote_data *remote) {
    size_t here = remote ? 0 : bytes;
    parcel *p = malloc(sizeof *p + here);
    if (!p) return NULL;
    *p = (parcel){.head = *head, .bytes = bytes, .remote = remote};
    if (here) memcpy(p->data, data, here);
    return p;
}

/* -- sending ---------------------------------------------------------------------------------------- */

wire wire_of(const un_group *g, enum wire_kind kind) {
    return (wire){.group = hosts_of(g)->key, .kind = (uint16_t)kind, .from = (uint16_t)g->rank};
}

un_link *link_of(un_group *g, int rank) {
    rank_of_hosts *r = &hosts_of(g)->of[rank];
    lock_network();
    if (!r->link) r->link = link_to(r->address, r->address_bytes, r->own_proof);
    un_link *link = r->link;
    unlock_network();
    return link;
}

/* The rank with this index on a host (modulo their number) or, once it has left the group, another
 * one there; -1: all have left. */
int listener_on(const un_group *g, int number, int index) {
    const host *h = &hosts_of(g)->host[number];
    for (int i = 0; i < h->count; i++) {
        int rank = h->ranks[(index + i) % h->count];
        if (!atomic_load(&control_of(g, rank)->closed)) return rank;
    }
    return -1;
}

/* One on each other host, from the host after ours on, so that not all send to the same one. */
void tell_mates(un_group *g, const wire *head, const void *data, size_t bytes) {
    const hosts *hs = hosts_of(g);
    for (int step = 1; step < hs->count; step++) {
        int rank = listener_on(g, (hs->mine + step) % hs->count, hs->index);
        if (rank >= 0) send_copy_of(link_of(g, rank), head, data, bytes);
    }
}

static void send_abort(un_group *g, uint64_t word) {
    wire head = wire_of(g, WIRE_ABORT);
    int rank = (int16_t)(word >> 8 & 0xffff);
    head.words[0] = word;
    if (rank >= 0 && rank < g->ranks) head.words[1] = read_word(&control_of(g, rank)->ending);
    tell_mates(g, &head, NULL, 0);
}

static void abort_inner(un_group *g, uint64_t word) {
    abort_group(hosts_of(g)->inner, (un_status)(word & 0xff), -1, 0);
}

static void abort_hosts(un_group *g, uint64_t word) {
    abort_inner(g, word);
    send_abort(g, word);
}

/* With it goes what we have posted, which may be under way by other hosts: notes follow failures. */
static void send_note(un_group *g, int kind, uint64_t about, const char *text) {
    hosts *hs = hosts_of(g);
    lock_network();
    for (int number = 0; number < hs->count; number++)
        if (number != hs->mine) tell_posted(hs, number);
    unlock_network();
    wire head = wire_of(g, WIRE_NOTE);
    head.extra = (uint32_t)kind;
    head.number = about;
    tell_mates(g, &head, text, strnlen(text, UN_TEXT_BYTES - 1));
}

static void ask_rank(un_group *g, int rank, uint64_t call) {
    wire head = wire_of(g, WIRE_ASK);
    head.number = call;
    send_copy_of(link_of(g, rank), &head, NULL, 0);
}

static void send_waiting(un_group *g) {
    const control *mine = control_of(g, g->rank);
    wire head = wire_of(g, WIRE_WAITING);
    head.words[0] = atomic_load(&mine->waiting);
    head.words[1] = atomic_load(&mine->waiting_tag);
    head.words[2] = atomic_load(&mine->unmatched);
    head.number = atomic_load(&mine->unmatched_tag);
    tell_mates(g, &head, traffic_of(g, g->rank), sizes_bytes(g));
}

/* -- receiving: with the network's lock ------------------------------------------------------------- */

static void mirror_note(un_group *g, const wire *head, const char *data, size_t bytes) {
    if (head->extra >= UN_NOTES || bytes >= UN_TEXT_BYTES) return;
    write_note(&control_of(g, head->from)->notes[head->extra], head->number, data, bytes);
}

static void mirror_abort(un_group *g, const wire *head) {
    int rank = (int16_t)(head->words[0] >> 8 & 0xffff);
    if (rank >= 0 && rank < g->ranks && head->words[1])
        write_word(&control_of(g, rank)->ending, head->words[1]);
    if (take_abort(g, head->words[0])) abort_inner(g, head->words[0]);
}

static void mirror_waiting(un_group *g, const wire *head, const char *data, size_t bytes) {
    control *theirs = control_of(g, head->from);
    if (bytes != sizes_bytes(g)) return;
    atomic_store(&theirs->waiting, 0);
    memcpy(traffic_of(g, head->from), data, bytes);
    atomic_store(&theirs->waiting_tag, head->words[1]);
    atomic_store(&theirs->unmatched, head->words[2]);
    atomic_store(&theirs->unmatched_tag, head->number);
    atomic_store(&theirs->waiting, head->words[0]);
}

/* In a group that is being made: without them nobody may tell us that they are here. */
static void ask_missing(un_group *g) {
    for (int rank = 0; rank < g->ranks; rank++)
        if (is_elsewhere(g, rank) && !atomic_load(&control_of(g, rank)->is_here))
            ask_rank(g, rank, 0);
}

/* Its last descriptors may come later, by other hosts. It may have left before it had passed on who
 * is here. */
static void receive_closed(hosts *hs, const wire *head, const void *data, size_t bytes) {
    un_group *g = hs->group;
    if (bytes == (size_t)g->ranks * sizeof(uint64_t))
        memcpy(traffic_of(g, head->from), data, bytes);
    atomic_store(&control_of(g, head->from)->is_here, 1);
    hs->of[head->from].last_call = head->number + 1;
    mirror_closed(hs, head->from);
    if (!hs->posted) ask_missing(g);
}

static void receive_ask(hosts *hs, const wire *head) {
    un_group *g = hs->group;
    if (head->number) atomic_store(&control_of(g, g->rank)->asked, head->number);
    tell_posted(hs, hs->of[head->from].host);
}

/* Whether `remote` was kept. */
static bool receive(hosts *hs, const wire *head, const void *data, size_t bytes,
                    remote_data *remote) {
    un_group *g = hs->group;
    if (head->from >= g->ranks || !is_elsewhere(g, head->from)) return false;
    if (head->proof != hs->of[head->from].proof) return false; /* a stranger's */
    bool is_message = head->kind == WIRE_ENTRY || head->kind == WIRE_REPLY ||
                      head->kind == WIRE_EXPECT;
    if ((is_message || head->kind == WIRE_DATA) && status_from_abort(g)) return false;
    if (head->kind == WIRE_DATA) return receive_data(hs, head, data, bytes, remote);
    if (is_message) return receive_message(hs, head, data, bytes, remote);
    if (remote) return false; /* the rest is short */
    switch (head->kind) {
    case WIRE_POSTS: receive_posts(hs, head, data, bytes); break;
    case WIRE_NOTE: mirror_note(g, head, data, bytes); break;
    case WIRE_ABORT: mirror_abort(g, head); break;
    case WIRE_CLOSED: receive_closed(hs, head, data, bytes); break;
    case WIRE_ASK: receive_ask(hs, head); break;
    case WIRE_WAITING: mirror_waiting(g, head, data, bytes); break;
    default: break;
    }
    return false;
}

static bool is_closed_key(uint64_t key) {
    for (size_t i = 0; i < CLOSED && i < all.closed_count; i++)
        if (all.closed[i] == key) return true;
    return false;
}

static bool deliver(const wire *head, const void *data, size_t bytes, remote_data *remote) {
    for (hosts *hs = all.first; hs; hs = hs->next)
        if (hs->key == head->group) return receive(hs, head, data, bytes, remote);
    if (is_closed_key(head->group)) return false;
    parcel *p = keep_parcel(head, data, bytes, remote);
    if (!p) return false;
    push_parcel(&all.unclaimed, p);
    if (++all.unclaimed_count > UNCLAIMED) {
        drop_parcel(take_parcel(&all.unclaimed));
        all.unclaimed_count--;
    }
    return true;
}

/* -- opening and closing ------------------------------------------------------------------------------ */

static void claim_parcels(hosts *hs) {
    parcel_queue others = {0};
    all.unclaimed_count = 0;
    for (parcel *p; (p = take_parcel(&all.unclaimed));) {
        if (p->head.group != hs->key) {
            push_parcel(&others, p);
            all.unclaimed_count++;
            continue;
        }
        if (!receive(hs, &p->head, p->remote ? NULL : p->data, p->bytes, p->remote))
            drop_remote(p->remote);
        free(p);
    }
    all.unclaimed = others;
    if (others.first)
        for (all.unclaimed.last = &all.unclaimed.first; *all.unclaimed.last;)
            all.unclaimed.last = &(*all.unclaimed.last)->next;
}

static void free_hosts(hosts *hs) {
    for (int rank = 0; hs->of && rank < hs->group->ranks; rank++) free(hs->of[rank].address);
    for (size_t i = 0; i < sizeof hs->scratch / sizeof *hs->scratch; i++) free(hs->scratch[i]);
    free(hs->host);
    free(hs->ranks);
    free(hs->of);
    free(hs->where);
    free(hs->step);
    free(hs->reach.sent);
    free(hs->reach.had);
    free(hs);
}

static bool make_tables(hosts *hs, size_t ranks) {
    hs->host = calloc(ranks, sizeof *hs->host);
    hs->ranks = calloc(ranks, sizeof *hs->ranks);
    hs->of = calloc(ranks, sizeof *hs->of);
    hs->where = calloc(ranks, sizeof *hs->where);
    hs->step = calloc(ranks, sizeof *hs->step);
    hs->reach.sent = calloc(ranks, sizeof *hs->reach.sent);
    hs->reach.had = calloc(ranks, sizeof *hs->reach.had);
    return hs->host && hs->ranks && hs->of && hs->where && hs->step && hs->reach.sent &&
           hs->reach.had;
}

/* False: the host numbers do not count from 0 without gaps. */
static bool place_ranks(hosts *hs, const int *hosts, int ranks, int rank) {
    int at = 0;
    for (int number = 0; at < ranks; number++) {
        host *h = &hs->host[number];
        h->ranks = hs->ranks + at;
        for (int r = 0; r < ranks; r++) {
            if (hosts[r] != number) continue;
            hs->of[r].host = number;
            hs->of[r].index = h->count++;
            hs->ranks[at++] = r;
        }
        if (!h->count) return false;
        hs->count = number + 1;
        hs->most = h->count > hs->most ? h->count : hs->most;
    }
    hs->mine = hs->of[rank].host;
    hs->index = hs->of[rank].index;
    return hs->count > 1;
}

/* The group closes: after this nothing writes into its mirrors or our memory. */
static void close_hosts(un_group *g) {
    hosts *hs = hosts_of(g);
    wire closed = wire_of(g, WIRE_CLOSED);
    closed.number = hs->posted;
    uint64_t word = atomic_load(&g->segment.header->abort);
    if (word) send_abort(g, word); /* peers that learn that we left should know why */
    tell_mates(g, &closed, hs->reach.sent, (size_t)g->ranks * sizeof(uint64_t));
    drive_network();
    lock_network();
    for (hosts **link = &all.first; *link; link = &(*link)->next)
        if (*link == hs) {
            *link = hs->next;
            break;
        }
    all.closed[all.closed_count++ % CLOSED] = hs->key;
    release_data(hs);
    release_messages(g);
    unlock_network();
    un_group_close(hs->inner);
    free_hosts(hs);
    g->reach = NULL;
}

static void fill_reach(hosts *hs) {
    int here = hs->host[hs->mine].count;
    for (int rank = 0; rank < hs->group->ranks; rank++)
        if (hs->of[rank].host != hs->mine)
            hs->where[rank] = hs->of[rank].index % here == hs->index ? HEARD : ELSEWHERE;
    reach *r = &hs->reach;
    r->where = hs->where;
    r->rounds = network_rounds;
    r->sleep = await_network;
    r->attend = attend_network;
    r->abort = abort_hosts;
    r->write_note = send_note;
    r->ask = ask_rank;
    r->post = post_descriptor;
    r->close = close_hosts;
    r->run = run_lanes;
    r->combine = combine_in_host_order;
    r->write_waiting = send_waiting;
    reach_messages(r);
}

un_status un_group_span(un_group *g, un_group *inner, const un_span *span) {
    hosts *hs = calloc(1, sizeof *hs);
    if (!hs) return UN_SYSTEM;
    *hs = (hosts){.group = g, .key = span->key};
    bool made = make_tables(hs, (size_t)g->ranks);
    bool placed = made && place_ranks(hs, span->hosts, g->ranks, g->rank);
    if (placed && hs->host[hs->mine].count != inner->ranks) placed = false;
    for (int rank = 0; placed && made && rank < g->ranks; rank++) {
        if (hs->of[rank].host == hs->mine) continue;
        rank_of_hosts *r = &hs->of[rank];
        r->own_proof = span->own_proofs[rank];
        r->proof = span->proofs[rank];
        r->address_bytes = span->address_bytes[rank];
        made = (r->address = malloc(r->address_bytes)) != NULL;
        if (made) memcpy(r->address, span->addresses[rank], r->address_bytes);
    }
    if (!made || !placed) {
        errno = made ? EINVAL : ENOMEM;
        free_hosts(hs);
        return UN_SYSTEM;
    }
    plan_posts(hs);
    hs->inner = inner;
    inner->is_inner = true;
    inner->poll = drive_network;
    g->poll = poll_network;
    fill_reach(hs);
    int cores = (int)g->segment.header->cores, here = hs->host[hs->mine].count;
    g->crowded = true; /* hosts may be containers on the same cores */
    g->roomy = 2 * here <= cores;
    g->cut_from = g->direct_from = SIZE_MAX; /* what does not fit into a descriptor takes lanes */
    if (hs->most * (hs->count - 1) * DESCRIBED_OVER_HOSTS <= DESCRIBED_BY_HOST)
        g->described_most = DESCRIBED_OVER_HOSTS;
    g->reach = &hs->reach;
    watch_alone(g);
    lock_network();
    hs->next = all.first;
    all.first = hs;
    claim_parcels(hs);
    unlock_network();
    atomic_store(&control_of(g, g->rank)->is_here, 1);
    post_call(hs, 0);
    return UN_OK;
}

bool un_group_meet(un_group *g, int64_t timeout_ns, const un_call *hooks, bool asks,
                   bool *missing) {
    if (group_is_inherited(g)) return false;
    if (asks) ask_missing(g);
    patience p = {.call = hooks};
    prepare_to_block(&p);
    bool here = false;
    for (int64_t end = clock_ns() + timeout_ns, looked = 0; !here;) {
        uint32_t seen = network_rounds();
        here = true;
        for (int rank = 0; rank < g->ranks; rank++) {
            missing[rank] = !atomic_load(&control_of(g, rank)->is_here);
            here &= !missing[rank];
        }
        int64_t now = clock_ns();
        if (here || now > end || status_from_abort(g)) break;
        if (now - looked > SLICE_NS && hooks->pause && hooks->pause(hooks->argument)) break;
        if (now - looked > SLICE_NS) looked = now;
        await_network(seen, 5 * 1000 * 1000);
    }
    return here;
}

/* -- losses --------------------------------------------------------------------------------------- */

void un_group_lose(un_group *g, int rank, bool is_silent) {
    if (group_is_inherited(g) || rank < 0 || rank >= g->ranks || !is_elsewhere(g, rank)) return;
    rank_of_hosts *r = &hosts_of(g)->of[rank];
    control *theirs = control_of(g, rank);
    lock_network();
    bool has_left = atomic_load(&theirs->closed) || r->last_call;
    unlock_network();
    if (!has_left) {
        write_word(&theirs->ending, is_silent ? (uint64_t)UN_ENDING_SILENT : 1);
        abort_group(g, UN_PEER_LOST, rank, 0);
    }
    lock_network();
    break_link(r->link); /* also if it was first used to tell of the end */
    unlock_network();
}

void un_group_leave(un_group *g, int rank) {
    if (group_is_inherited(g) || rank < 0 || rank >= g->ranks || !is_elsewhere(g, rank)) return;
    lock_network();
    mirror_closed(hosts_of(g), rank);
    unlock_network();
}

/* The group is over, and nothing will take what has arrived for it: its senders wait for that. */
void release_data(hosts *hs) {
    lock_network();
    drop_parcels(&hs->early);
    unlock_network();
}

void release_messages(un_group *g) {
    lock_network();
    drop_parcels(&hosts_of(g)->inbox);
    atomic_store(&hosts_of(g)->unread, 0);
    forget_parcels(g);
    unlock_network();
}

/* A thread that holds the lock of the messages handles them itself. */
static void release_all(hosts *hs) {
    release_data(hs);
    if (pthread_mutex_trylock(&hs->group->messages.lock)) return;
    release_messages(hs->group);
    pthread_mutex_unlock(&hs->group->messages.lock);
}

/* A link that broke while its process lives, as far as we know: nothing will arrive on it. */
static void look_for_broken_links(hosts *hs) {
    for (int rank = 0; rank < hs->group->ranks && !status_from_abort(hs->group); rank++)
        if (link_is_broken(hs->of[rank].link, BROKEN_NS)) un_group_lose(hs->group, rank, true);
}

static void look_after_groups(void) {
    lock_network();
    for (hosts *hs = all.first; hs; hs = hs->next) {
        look_for_broken_links(hs);
        if (status_from_abort(hs->group)) release_all(hs);
    }
    unlock_network();
}

/* -- the network ---------------------------------------------------------------------------------- */

/* It closes: free parcels of groups that were never opened, which hold UCX's memory. */
static void drop_unclaimed(void) {
    drop_parcels(&all.unclaimed);
    all.unclaimed_count = 0;
}

static void forget_hosts(void) { memset(&all, 0, sizeof all); }
static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_hosts); }

const char *un_network_open(const char *const *settings, const void **address, size_t *bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    const network_user user = {deliver, look_after_groups, drop_unclaimed};
    return open_network(settings, &user, address, bytes);
}

void un_network_close(void) {
    lock_network();
    bool is_used = all.first != NULL;
    unlock_network();
    if (!is_used) close_network();
}
