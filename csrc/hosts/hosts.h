/* Groups over several hosts.
 *
 * Every host has a segment with a control block for each rank of the group. What a rank writes for
 * its peers it also sends to its mate on each other host, which writes it into that rank's control
 * block there, its mirror: descriptors, notes, the abort word, that it has left, what it waits for.
 * So all that ranks of one host do with each other's control blocks works over hosts too: meeting,
 * comparing, error texts. Descriptors go from host to host: see posts.c.
 *
 * What does not fit into a descriptor moves by lanes.c: inside a host through a second group of its
 * ranks, `inner`; between hosts from memory to memory. Messages go from process to process.
 *
 * base/ and local/ call this folder through the table `reach` of base/group.h.
 *
 * hosts      what a group knows of its hosts; mirrors
 * posts      descriptors: by which hosts they travel
 * order      arithmetic in the order of hosts
 * messages   point to point
 * lanes, pipeline, moves, sums, data   large calls: see lanes.h
 */
#ifndef UNISONO_HOSTS_H
#define UNISONO_HOSTS_H

#include "local/call.h"
#include "network/network.h"

enum wire_kind {
    WIRE_POSTS = 1, /* descriptors; number: the call; the rest is the first one, see posts.c */
    WIRE_NOTE,      /* extra: its kind; number: what it is about; then its text */
    WIRE_ABORT,     /* words: the abort word, how the rank in it ended */
    WIRE_CLOSED,    /* number: of its last call; then messages and replies sent to each rank */
    WIRE_ASK,       /* where are you? number: in which call of ours */
    WIRE_WAITING,   /* words: as in the control block; then messages to and from each rank */
    WIRE_ENTRY,     /* a message; extra: dtype; number: of the channel; words: handle, tag, bytes */
    WIRE_REPLY,     /* number: the handle */
    WIRE_EXPECT,    /* a receive; extra: dtype; number: tag; words: 0, entries read before, bytes */
    WIRE_DATA,      /* of a large call; number: of the call and of the transfer within it */
};

typedef struct parcel { /* what has arrived, until it is taken */
    struct parcel *next;
    wire head;
    size_t bytes;
    remote_data *remote; /* NULL: it is here */
    char data[];
} parcel;

typedef struct parcel_queue {
    parcel *first, **last;
} parcel_queue;

typedef struct host { /* ranks[0 .. count) in their order */
    const int *ranks;
    int count;
} host;

typedef struct rank_of_hosts { /* what a process knows of a rank of the group */
    int host, index;           /* where it is, and its place there */
    char *address;             /* of its UCX worker; NULL on our host */
    size_t address_bytes;
    uint64_t own_proof, proof; /* what we send to it carries, and what it sends to us */
    un_link *link;             /* NULL: not needed yet; with the network's lock */
    uint32_t posted[2]; /* after its latest descriptors, see posts.c; with the network's lock */
    uint64_t last_call; /* it has left the group after that one, plus 1; with the network's lock */
    uint64_t entries_sent, entries_read; /* of messages, with their lock */
    parcel_queue ahead;                  /* entries that arrived out of order */
    parcel_queue expected;               /* its receives that wait for a message of ours */
    uint32_t told;                       /* our receives of which it knows */
    uint32_t given, taken;               /* data of this call, with the call lock */
} rank_of_hosts;

typedef struct hosts { /* of a group */
    reach reach;
    un_group *group, *inner;
    uint64_t key;
    int count, mine; /* how many there are, and the number of ours */
    int index;       /* our place in it */
    int most;        /* ranks of any host */
    host *host;
    int *ranks;         /* host by host */
    rank_of_hosts *of;  /* each rank of the group */
    uint8_t *where;     /* for `reach` */
    bool spreads;       /* see posts.c */
    int steps;          /* of a descriptor's travel */
    struct hosts *next; /* of this process */

    /* with the network's lock */
    uint64_t posted;         /* our latest call */
    int *step;               /* by lane: how many steps of it we have done */
    bool is_left;            /* some rank has left the group */
    parcel_queue early;      /* data that arrived before it was wanted */
    struct flight *wanted;   /* data that has not arrived yet */
    parcel_queue inbox;      /* for the thread with the lock of the messages */
    _Atomic uint32_t unread; /* parcels in it */

    /* with the lock of the messages */
    uint32_t transfers; /* messages in transit */

    /* with the call lock */
    char *scratch[8];
    size_t scratch_bytes[8];
} hosts;

static inline hosts *hosts_of(const un_group *g) { return (hosts *)g->reach; }

/* Our mates are those with our own index; hosts are counted in a circle. */
static inline int rank_on(const hosts *hs, int number, int index) {
    const host *h = &hs->host[number % hs->count];
    return h->ranks[index % h->count];
}

un_link *link_of(un_group *g, int rank);
int listener_on(const un_group *g, int number, int index);
void tell_mates(un_group *g, const wire *head, const void *data, size_t bytes);
wire wire_of(const un_group *g, enum wire_kind kind);

void push_parcel(parcel_queue *q, parcel *p);
parcel *take_parcel(parcel_queue *q);
parcel *find_parcel(parcel_queue *q, int from, uint64_t number); /* takes it, too */
void drop_parcels(parcel_queue *q);
void drop_parcel(parcel *p);
parcel *keep_parcel(const wire *head, const void *data, size_t bytes, remote_data *remote);

void release_data(hosts *hs);
void release_messages(un_group *g); /* with their lock */

/* order.c */
typedef struct host_arithmetic {
    un_dtype dtype;                /* of sums between hosts */
    size_t item_bytes, wide_bytes; /* of an element, and of an element of such a sum */
    un_reduction inside;           /* how ranks of a host are combined, then hosts */
    reducer first, second;
    double factor, divisor;
    kernel *widen, *narrow; /* NULL: sums have the type of the tensors */
} host_arithmetic;
host_arithmetic arithmetic_of(const un_group *g, const un_call *call);
void convert(kernel *how, void *to, const void *from, size_t items);

/* Of a call whose contributions form a tree (base/tree.h): which nodes our host has of its ranks, and
 * which sums all hosts make of theirs. */
typedef struct host_sum {
    tree_node node;
    int host;
    size_t place; /* among those of its host */
} host_sum;

typedef struct host_tree {
    tree_sum arithmetic;
    uint32_t total;
    size_t own, here;      /* nodes of this rank, and of all ranks of our host, */
    size_t *of_rank;       /* each of them, by index */
    tree_node *nodes;      /* those of our host, */
    size_t *end;           /* and which of them make each of its sums */
    size_t *count, *begin; /* sums of each host, and of those before it */
    size_t all;            /* sums, */
    host_sum *sum;         /* in the order of their contributions */
    tree_node *sorted;     /* scratch */
    const void **from;
} host_tree;
host_tree *make_host_tree(execution *x); /* one block of memory; NULL: no memory */
void combine_in_host_order(execution *x, char *to, const void **sources, size_t bytes);

/* posts.c; but for the first two, with the network's lock */
void post_descriptor(execution *x);
void post_call(hosts *hs, uint64_t call); /* 0: the greeting */
void receive_posts(hosts *hs, const wire *head, const char *data, size_t bytes);
void tell_posted(hosts *hs, int host); /* our latest descriptor, at once */
void mirror_closed(hosts *hs, int rank);
void plan_posts(hosts *hs);

/* messages.c: with the lock of the messages, but for receive_message */
bool receive_message(hosts *hs, const wire *head, const void *data, size_t bytes,
                     remote_data *remote);
void reach_messages(reach *r); /* fill in its functions for messages */
void forget_parcels(un_group *g);

/* lanes.c */
un_status run_lanes(execution *x);

/* data.c */
bool receive_data(hosts *hs, const wire *head, const void *data, size_t bytes, remote_data *remote);
void await_end(transfer *t); /* landed or broken: its memory is unused */

#endif
