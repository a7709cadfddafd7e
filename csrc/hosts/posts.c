/* Descriptors between hosts: what each rank posts for a call, from mirror to mirror.
 *
 * The ranks with one index on their hosts form a lane; a host that has fewer ranks is in each lane
 * by the one with that index modulo their number. In each lane a host's descriptor travels to all
 * others in steps. Between few hosts it is sent to each of them. Among many, a host sends in step k
 * what it has of 2^k hosts, itself and those before it, to the 2^k-th after it: so every descriptor
 * reaches all of them, once each, after log2 of their number, and so many messages of each host. Who
 * sends a descriptor on has it in its mirror; when a host does a step depends only on which ones are
 * there, so it does not matter who brought them. Whoever drives the network sends them on.
 *
 * A descriptor takes its payload along where some rank on its way needs it: the way from one host
 * to another, at a distance of so many hosts, is that of the distance's binary digits, the lowest
 * first.
 *
 * Call 0 is the greeting: it says that a rank has opened the group. So a process connects only to
 * those to which it sends in these steps, until something else is to be sent.
 *
 * A mirror is written for a call only once its rank has posted it, so that all ranks have finished
 * the call before the previous one, which was in the same place; and a rank that has finished a call
 * has sent on all that it was to send on in it.
 */
#include "hosts/hosts.h"

enum {
    DIRECT_HOSTS = 3, /* so many send each other their descriptors */
    HAS_SIZES = 1,    /* what follows a descriptor: the sizes of pairs; */
    IS_CUT = 2,       /* of a payload the parts that ranks on its way need; */
    TO_ROOT = 4,      /* a payload only on the way to the root */
    FLAG_BITS = 3,    /* above: how many bytes, and whose it is */
    RANK_SHIFT = 20,
};

_Static_assert(EAGER_MOST < 1 << (RANK_SHIFT - FLAG_BITS) && UN_MAX_RANKS <= 1 << (32 - RANK_SHIFT),
               "a rank, the bytes and the flags fit into a word");

typedef struct post {      /* in a message; the first one is in its header */
    uint32_t what, unused; /* rank, bytes and flags */
    uint64_t words[3];     /* signature, bytes, hash */
} post;

typedef struct letter { /* what is sent to one host, as one message if it fits */
    hosts *hosts;
    int reader, host; /* to whom, and where it is */
    wire head;        /* without a kind: there is nothing in it */
    size_t bytes;
    char data[EAGER_MOST];
} letter;

void plan_posts(hosts *hs) {
    hs->spreads = hs->count > DIRECT_HOSTS;
    hs->steps = hs->count - 1;
    if (hs->spreads)
        for (hs->steps = 0; 1 << hs->steps < hs->count;) hs->steps++;
    for (int lane = 0; lane < hs->most; lane++) hs->step[lane] = hs->steps;
}

static int distance(const hosts *hs, int from, int to) {
    return (to - from + hs->count) % hs->count;
}

/* Whether what goes from a host to another one passes a third. */
static bool is_on_way(const hosts *hs, int from, int at, int to) {
    int near = distance(hs, from, at), far = distance(hs, from, to), digits = 1;
    while (hs->spreads && digits <= near) digits *= 2;
    return hs->spreads ? far % digits == near : far == near;
}

static bool has_posted(const un_group *g, int rank, uint64_t call) {
    if (!call) return atomic_load(&control_of(g, rank)->is_here);
    return atomic_load_explicit(&descriptor_of(g, rank, call)->call, memory_order_relaxed) >= call;
}

/* -- writing ---------------------------------------------------------------------------------------- */

/* The payload of a rank, or the parts of it that go by a host; returns how many bytes. `packs`: from
 * its descriptor; else into it. */
static size_t copy_payload(const hosts *hs, int rank, uint32_t follows, char *payload, int by,
                           char *packed, bool packs) {
    size_t bytes = follows >> FLAG_BITS, done = 0, pitch = bytes / (size_t)hs->group->ranks;
    if (!(follows & IS_CUT)) {
        memcpy(packs ? packed : payload, packs ? payload : packed, bytes);
        return bytes;
    }
    for (int h = 0; h < hs->count; h++) {
        if (h == hs->of[rank].host || !is_on_way(hs, hs->of[rank].host, by, h)) continue;
        for (int i = 0; i < hs->host[h].count; i++, done += pitch) {
            char *part = payload + (size_t)hs->host[h].ranks[i] * pitch;
            memcpy(packs ? packed + done : part, packs ? part : packed + done, pitch);
        }
    }
    return done;
}

static void begin_letter(letter *l, hosts *hs, int reader) {
    l->hosts = hs;
    l->reader = reader;
    l->host = hs->of[reader].host;
    l->head.kind = 0;
}

static void send_letter(letter *l) {
    if (l->head.kind)
        send_copy_of(link_of(l->hosts->group, l->reader), &l->head, l->data, l->bytes);
    l->head.kind = 0;
}

/* What `rank` has posted for our latest call. */
static void add_post(letter *l, int rank) {
    hosts *hs = l->hosts;
    un_group *g = hs->group;
    uint64_t call = hs->posted;
    descriptor *d = descriptor_of(g, rank, call);
    uint32_t follows = hs->of[rank].posted[call & 1];
    post p = {.words = {read_word(&d->signature), read_word(&d->bytes), read_word(&d->hash)}};
    size_t sizes = follows & HAS_SIZES ? sizes_bytes(g) : 0;
    int root = (int)(p.words[0] >> 24 & 0xffff);
    if (follows & TO_ROOT && !is_on_way(hs, hs->of[rank].host, l->host, hs->of[root].host))
        follows &= (1 << FLAG_BITS) - 1;
    if (l->head.kind && l->bytes + sizeof p + sizes + (follows >> FLAG_BITS) > sizeof l->data)
        send_letter(l);
    size_t before = l->bytes;
    if (l->head.kind)
        l->bytes += sizeof p;
    else
        l->bytes = 0;
    char *data = l->data + l->bytes;
    if (sizes) memcpy(data, sizes_of(g, rank, call), sizes);
    size_t payload = copy_payload(hs, rank, follows, d->payload, l->host, data + sizes, true);
    p.what = (uint32_t)rank << RANK_SHIFT | (uint32_t)(sizes + payload) << FLAG_BITS |
             (follows & ((1 << FLAG_BITS) - 1));
    l->bytes += sizes + payload;
    if (l->head.kind) {
        memcpy(l->data + before, &p, sizeof p);
        return;
    }
    l->head = wire_of(g, WIRE_POSTS);
    l->head.number = call;
    l->head.extra = p.what;
    memcpy(l->head.words, p.words, sizeof p.words);
}

void tell_posted(hosts *hs, int host) {
    letter l;
    int rank = hs->spreads ? listener_on(hs->group, host, hs->index) : -1;
    if (rank < 0) return;
    begin_letter(&l, hs, rank);
    add_post(&l, hs->group->rank);
    send_letter(&l);
}

static int rank_in(const hosts *hs, int host, int lane) {
    return lane < hs->host[host].count ? hs->host[host].ranks[lane] : -1;
}

/* Who gets what in a step. */
typedef struct step {
    int reader, blocks; /* -1: nobody is left there */
} step;

static step step_of(const hosts *hs, int lane, int number) {
    int ahead = hs->spreads ? 1 << number : number + 1, to = (hs->mine + ahead) % hs->count;
    int blocks = !hs->spreads ? 1 : ahead < hs->count - ahead ? ahead : hs->count - ahead;
    return (step){listener_on(hs->group, to, lane), blocks};
}

/* False: not all that it sends is here yet. */
static bool do_step(hosts *hs, int lane, int number) {
    step s = step_of(hs, lane, number);
    for (int i = 1; i < s.blocks; i++) {
        int rank = rank_in(hs, distance(hs, i, hs->mine), lane);
        if (rank >= 0 && !has_posted(hs->group, rank, hs->posted)) return false;
    }
    if (s.reader < 0) return true;
    letter l;
    begin_letter(&l, hs, s.reader);
    for (int i = 0; i < s.blocks; i++) {
        int rank = rank_in(hs, distance(hs, i, hs->mine), lane);
        if (rank >= 0) add_post(&l, rank);
    }
    send_letter(&l);
    return true;
}

static void do_steps(hosts *hs) {
    for (int lane = hs->index; lane < hs->most; lane += hs->host[hs->mine].count)
        while (hs->step[lane] < hs->steps && do_step(hs, lane, hs->step[lane])) hs->step[lane]++;
}

/* Among many hosts, who waits for a rank may have to wait for another one, which has left. */
static void notice_leavers(hosts *hs) {
    un_group *g = hs->group;
    for (int rank = 0; hs->spreads && hs->is_left && rank < g->ranks; rank++)
        if (is_elsewhere(g, rank) && atomic_load(&control_of(g, rank)->closed) &&
            !has_posted(g, rank, hs->posted))
            abort_group(g, UN_PEER_CLOSED, rank, hs->posted);
}

void post_call(hosts *hs, uint64_t call) {
    lock_network();
    hs->posted = call;
    for (int lane = hs->index; lane < hs->most; lane += hs->host[hs->mine].count)
        hs->step[lane] = 0;
    do_steps(hs);
    notice_leavers(hs);
    unlock_network();
}

void post_descriptor(execution *x) {
    un_group *g = x->g;
    hosts *hs = hosts_of(g);
    un_operation o = x->call->operation;
    bool to_root = o == UN_REDUCE || (o == UN_GATHER && x->pairs_agree);
    uint32_t follows = (uint32_t)x->payload_bytes << FLAG_BITS;
    if (x->pairs_agree) follows |= HAS_SIZES;
    if (follows >> FLAG_BITS && to_root) follows |= TO_ROOT;
    if (follows >> FLAG_BITS && un_is_wide_input(o)) follows |= IS_CUT;
    lock_network();
    hs->of[g->rank].posted[x->number & 1] = follows;
    post_call(hs, x->number);
    unlock_network();
}

/* -- reading ---------------------------------------------------------------------------------------- */

/* As `publish`, on behalf of a rank on another host. */
static void publish_mirror(un_group *g, int rank, flag_t *flag, uint64_t value) {
    atomic_store_explicit(flag, value, memory_order_seq_cst);
    if (atomic_load_explicit(&control_of(g, rank)->sleepers, memory_order_seq_cst))
        wake(flag, OF_RANKS, INT_MAX);
}

static size_t bytes_after(const post *p) {
    return (p->what & ((1 << RANK_SHIFT) - 1)) >> FLAG_BITS;
}

static void mirror_post(hosts *hs, uint64_t call, const post *p, char *data) {
    un_group *g = hs->group;
    int rank = (int)(p->what >> RANK_SHIFT), root = (int)(p->words[0] >> 24 & 0xffff);
    if (rank >= g->ranks || !is_elsewhere(g, rank) || has_posted(g, rank, call)) return;
    if (!call) {
        atomic_store(&control_of(g, rank)->is_here, 1);
        return;
    }
    descriptor *theirs = descriptor_of(g, rank, call);
    uint32_t flags = p->what & ((1 << FLAG_BITS) - 1);
    size_t sizes = flags & HAS_SIZES ? sizes_bytes(g) : 0, bytes = bytes_after(p);
    if (bytes < sizes || (flags & TO_ROOT && root >= g->ranks)) return;
    bytes -= sizes;
    if (flags & IS_CUT) {
        size_t parts = 0;
        for (int h = 0; h < hs->count; h++)
            if (h != hs->of[rank].host && is_on_way(hs, hs->of[rank].host, hs->mine, h))
                parts += (size_t)hs->host[h].count;
        bytes = bytes / parts * (size_t)g->ranks;
    }
    if (bytes > sizeof theirs->payload) return;
    if (sizes) memcpy(sizes_of(g, rank, call), data, sizes);
    uint32_t follows = (uint32_t)bytes << FLAG_BITS | flags;
    copy_payload(hs, rank, follows, theirs->payload, hs->mine, data + sizes, false);
    hs->of[rank].posted[call & 1] = follows;
    write_word(&theirs->signature, p->words[0]);
    write_word(&theirs->bytes, p->words[1]);
    write_word(&theirs->hash, p->words[2]);
    publish_mirror(g, rank, &theirs->call, call);
    if (hs->of[rank].last_call == call + 1) mirror_closed(hs, rank);
}

void receive_posts(hosts *hs, const wire *head, const char *data, size_t bytes) {
    post p = {.what = head->extra};
    memcpy(p.words, head->words, sizeof p.words);
    for (;;) {
        size_t own = bytes_after(&p);
        if (own > bytes) return;
        mirror_post(hs, head->number, &p, (char *)(uintptr_t)data);
        data += own, bytes -= own;
        if (bytes < sizeof p) break;
        memcpy(&p, data, sizeof p);
        data += sizeof p, bytes -= sizeof p;
    }
    do_steps(hs);
}

/* A rank has left the group; what it posted before may still be on its way by other hosts. */
void mirror_closed(hosts *hs, int rank) {
    un_group *g = hs->group;
    uint64_t last = hs->of[rank].last_call;
    if (last > 1 && !has_posted(g, rank, last - 1)) return;
    atomic_store(&control_of(g, rank)->closed, 1);
    hs->is_left = true;
    notice_leavers(hs);
    wake_everyone(g);
}
