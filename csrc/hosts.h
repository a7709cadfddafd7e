/* Groups over several hosts.
 *
 * Every host has a segment with a control block for each rank of the group. What a rank writes for
 * its peers it also sends to its mate on each other host, which writes it into that rank's control
 * block there, its mirror: descriptors, notes, the abort word, that it has left, what it waits for.
 * So all that ranks of one host do with each other's control blocks works over hosts too: meeting,
 * comparing, error texts.
 *
 * What does not fit into a descriptor moves by lanes.c: inside a host through a second group of its
 * ranks, `inner`; between hosts from memory to memory. Messages go from process to process
 * (host_messages.c).
 *
 * hosts           what a group knows of its hosts; mirrors
 * host_order      arithmetic in the order of hosts
 * host_messages   point to point
 * lanes           large calls
 * network, ucx    this process's UCX worker; UCX's functions
 */
#ifndef UNISONO_HOSTS_H
#define UNISONO_HOSTS_H

#include "call.h"
#include "network.h"

enum wire_kind {
    WIRE_HELLO = 1, /* the sender has opened the group */
    WIRE_DESCRIPTOR,      /* number: the call; words: signature, bytes, hash; then sizes and payload */
    WIRE_NOTE,      /* extra: its kind; number: what it is about; then its text */
    WIRE_ABORT,     /* words: the abort word, how the rank in it ended */
    WIRE_CLOSED,    /* then messages and replies sent to each rank before */
    WIRE_ASK,     /* where are you? number: in which call of ours */
    WIRE_WAITING, /* words: as in the control block; then messages sent to, received from each rank */
    WIRE_ENTRY,   /* a message; extra: its dtype; number: of the channel; words: handle, tag, bytes */
    WIRE_REPLY,   /* number: the handle */
    WIRE_DATA,    /* of a large call; number: of the call and of the transfer within it */
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

typedef struct address {
    char *bytes;
    size_t count;
} address;

typedef struct spread {
    un_group *group, *inner;
    uint64_t key;
    int hosts, mine; /* how many there are, and the number of ours */
    int index;       /* our place in it */
    host *host;
    int *host_of, *index_of; /* by rank */
    int *ranks;              /* host by host */
    address *addresses;      /* by rank; empty for ours */
    un_link **links;         /* by rank; NULL: not needed yet */
    bool is_strict, rounds;  /* see host_order.c */
    struct spread *next;     /* of this process */

    /* with the network's lock */
    parcel_queue early;     /* data that arrived before it was wanted */
    struct wanted *wanted;  /* data that has not arrived yet */
    parcel_queue inbox;     /* messages and replies, for the thread with the lock of the messages */
    _Atomic uint32_t unread; /* parcels in it */

    /* with the lock of the messages */
    uint64_t *sent, *had; /* messages and replies, by rank */
    uint64_t *entries_sent, *entries_read;
    parcel_queue *ahead; /* entries that arrived out of order, by rank */
    uint32_t transfers;  /* messages in transit */

    /* with the call lock */
    uint32_t *given, *taken; /* data of this call, by rank */
    char *scratch[4];
    size_t scratch_bytes[4];
} spread;

static inline bool is_elsewhere(const un_group *g, int rank) {
    return g->spread && g->spread->host_of[rank] != g->spread->mine;
}

/* Whether this rank receives from `rank` and writes its mirror. */
static inline bool is_heard_here(const un_group *g, int rank) {
    const spread *s = g->spread;
    return is_elsewhere(g, rank) && s->index_of[rank] % s->host[s->mine].count == s->index;
}

static inline int mate_on(const spread *s, int host) {
    return s->host[host].ranks[s->index % s->host[host].count];
}

un_link *link_of(un_group *g, int rank);
void tell_mates(un_group *g, const wire *head, const void *data, size_t bytes);
wire wire_of(const un_group *g, enum wire_kind kind);

void spread_descriptor(execution *x, uint64_t signature, uint64_t bytes, uint64_t hash);
void spread_abort(un_group *g, uint64_t word);
void spread_note(un_group *g, int kind, uint64_t about, const char *text);
void spread_waiting(un_group *g);
void spread_ask(un_group *g, int rank, uint64_t call);
void close_spread(un_group *g);

void push_parcel(parcel_queue *q, parcel *p);
parcel *take_parcel(parcel_queue *q);
void drop_parcels(parcel_queue *q);
void drop_parcel(parcel *p);
parcel *keep_parcel(const wire *head, const void *data, size_t bytes, remote_data *remote);

bool any_group_is_spread(void);
void drop_unclaimed(void);
void forget_hosts_after_fork(void);
void look_after_groups(void); /* periodically, in the network's thread */
void release_data(spread *s);
void release_messages(un_group *g); /* with their lock */

/* host_order.c */
typedef struct host_arithmetic {
    un_dtype dtype;              /* of sums between hosts */
    size_t item_bytes, wide_bytes; /* of an element, and of an element of such a sum */
    un_reduction inside;         /* how ranks of a host are combined, then hosts */
    reducer first, second;
    double factor, divisor;
    kernel *widen, *narrow; /* NULL: sums have the type of the tensors */
} host_arithmetic;
host_arithmetic arithmetic_of(const un_group *g, const un_call *call);
void convert(kernel *how, void *to, const void *from, size_t items);
void combine_in_host_order(execution *x, char *to, const void **sources, size_t bytes);

/* host_messages.c: with the lock of the messages, but for receive_message */
bool receive_message(spread *s, const wire *head, const void *data, size_t bytes, remote_data *remote);
void start_sending_over(un_group *g, un_message *m);
void send_reply_over(un_group *g, int source, uint64_t handle);
bool receive_parcel(un_group *g, un_message *m, parcel *p);
bool progress_over_hosts(un_group *g);
void settle_messages(un_group *g);
void forget_parcels(un_group *g);

/* lanes.c */
un_status run_lanes(execution *x);

/* host_data.c */
bool receive_data(spread *s, const wire *head, const void *data, size_t bytes, remote_data *remote);
void settle(transfer *const *transfers, size_t count);

#endif
