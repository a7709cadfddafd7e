/* One rank's membership in a group, as its process knows it, and how groups end.
 *
 * base/     system          the clock, futexes, threads, forks
 *           layout, segment, memory   one block of shared memory; how much the machine has left
 *           constants       sizes of pieces, thresholds, and how long to spin before sleeping
 *           group, watcher  a membership, and how a group ends; the deaths of peers
 *           wait            spin, yield, sleep
 *           records         the record of every call, and notes for peers
 *           stream, pages, changes   user memory as one sequence of bytes; shared pages in its
 *                           place; what changed in it
 *           reduce, kernels, halves   arithmetic, once per instruction set, and the dispatch
 * local/    membership      opening and closing
 *           call, collectives, ragged   one call from post to end; how each collective moves data
 *           schedules       all_reduce or broadcast by a schedule that the caller passes
 *           blocks, direct  memory that all ranks map; calls that read it without slots
 *           reading         a peer's own memory, copied by the kernel
 *           copiers         threads that take part in large calls where cores are idle
 *           worker          the call lock, and asynchronous works
 *           messages, channels, send, receive, matching, progress_thread, deadlock   point to point
 * network/  ucx, network    UCX's functions; this process's worker and its links
 * hosts/                    groups over several hosts: see hosts.h
 * torch_ops/                bodies of torch's operators
 * python/                   the binding
 *
 * Each folder includes only headers of those above it (tools/check_includes.py).
 */
#ifndef UNISONO_GROUP_H
#define UNISONO_GROUP_H

#include <string.h>

#include "base/constants.h"
#include "base/layout.h"
#include "base/system.h"

/* Messages or receives by source and tag, in order within each pair: see matching.c. */
typedef struct match_bucket {
    un_match *first, *last;
} match_bucket;

enum { FEW_BUCKETS = 8 };

typedef struct match_table {
    match_bucket *buckets; /* NULL: `few`, until there are more */
    size_t size;           /* a power of two */
    size_t count;
    match_bucket few[FEW_BUCKETS];
} match_table;

typedef struct fifo_ends { /* of the FIFOs to and from one rank */
    uint64_t written, read;
    bool ready; /* ours to it has memory */
} fifo_ends;

/* How long to spin before sleeping. */
typedef struct spinning {
    int64_t ns, most_ns;
    uint32_t short_ones;   /* since the last longer trial, */
    uint32_t before_trial; /* and how many until the next */
    bool is_trial;
} spinning;

struct execution;
struct parcel;

/* How a group reaches its ranks on other hosts: the table through which this folder and local/ call
 * hosts/, which fills it in. */
typedef struct reach {
    const uint8_t *where; /* by rank: HERE, HEARD or ELSEWHERE */

    /* waiting */
    uint32_t (*rounds)(void); /* changes after each round of the network in which something came */
    void (*sleep)(uint32_t seen, int64_t ns); /* until it is no longer `seen` */
    void (*attend)(bool begins); /* this thread drives the network while it waits; no longer */

    /* what this rank publishes goes to the other hosts, too */
    void (*abort)(un_group *g, uint64_t word);
    void (*write_note)(un_group *g, int kind, uint64_t about, const char *text);
    void (*ask)(un_group *g, int rank, uint64_t call);
    void (*post)(struct execution *x);
    void (*close)(un_group *g);

    /* calls: what does not fit into descriptors; sums of what does */
    un_status (*run)(struct execution *x);
    void (*combine)(struct execution *x, char *to, const void **sources, size_t bytes);

    /* messages, with their lock */
    uint64_t *sent, *had; /* messages and replies, by rank */
    void (*send)(un_group *g, un_message *m);
    void (*expect)(un_group *g, un_message *m); /* a receive waits for a message */
    void (*reply)(un_group *g, int source, uint64_t handle);
    bool (*receive)(un_group *g, un_message *m, struct parcel *parcel); /* true: it needs a reply */
    void (*drop)(struct parcel *parcel);
    bool (*progress)(un_group *g);
    void (*write_waiting)(un_group *g);
    void (*finish)(un_group *g);  /* the group is over: wait until our memory is unused, */
    void (*release)(un_group *g); /* and drop what has arrived */
} reach;

/* Of a rank: on this host; elsewhere, and this rank receives for its host what it publishes;
 * elsewhere, and another rank of this host does. */
enum where { HERE, HEARD, ELSEWHERE };

/* One rank's membership in a group, as its process knows it. Each part names the file that owns
 * it. What every call touches lies in two cache lines: the first, and `calls` with what follows. */
struct un_group {
    _Alignas(LINE_BYTES) int rank;
    int ranks;
    bool crowded;        /* more ranks than cores: waiting must yield the core */
    bool roomy;          /* a core for every rank's worker too */
    bool is_inner;       /* of a group over hosts, whose calls are recorded instead of this one's */
    bool is_covered;     /* for a while: a call is under way that is recorded as a whole */
    unsigned process;    /* which process opened it, see group.c */
    struct reach *reach; /* NULL: all ranks are on this host */

    struct { /* segment.c */
        char *base;
        header *header;
        size_t control_bytes, data_offset, channel_offset, fifo_offset;
        size_t bytes;
        _Atomic uint32_t *users; /* memberships of this process over this mapping */
        int descriptor;
        bool slice_ready;
    } segment;

    _Alignas(LINE_BYTES) struct { /* call.c and collectives.c, with the call lock */
        flag_t latest;            /* the number of the latest call; any thread may read it */
        uint64_t steps;           /* of moving data, finished before it */
        flag_t noticed_end;   /* the latest call when we learned that the group is over, plus 1 */
        const void **sources; /* scratch: for each rank, where its part of a reduction lies, */
        size_t *descriptor_pitch; /* and how far apart its parts are there; 0: in slots */
    } calls;

    flag_t recorded; /* records.c: how many records so far */

    struct {                     /* worker.c: who may be in a call, and what was submitted */
        _Atomic uintptr_t owner; /* the thread that has the call lock; never torn */
        _Atomic uint32_t call_lock;
        _Atomic uint32_t queued;
        pthread_mutex_t queue_lock;
        un_work *first, *last;
        struct execution *begun;   /* of the first one, if that has begun; with the call lock */
        _Atomic uint32_t may_rest; /* there is no other, and the thread that waits for it runs it */
        _Atomic uint32_t finished; /* works so far */
        _Atomic bool has_thread;
        pthread_t thread;
        _Atomic uint32_t bell;
        _Atomic uint32_t asleep;
        _Atomic uint32_t stopping;
        _Atomic uint32_t waiters; /* threads that wait for a work */
    } worker;

    size_t cut_from, direct_from, described_most; /* by constants.h */

    spinning spin;      /* wait.c, with the call lock */
    bool (*poll)(void); /* drives the network while we wait; NULL: nothing crosses it */

    fifo_ends *fifos; /* schedules.c: one per rank */

    struct { /* messages.c, channels.c, send.c, receive.c: under its lock */
        pthread_mutex_t lock;
        un_message *oldest, *newest; /* of all that are under way */
        struct traffic *traffic;     /* one per rank */
        match_table wanted;          /* receives without a message, */
        match_table unmatched;       /* and messages that no receive has matched */
        uint64_t matches;            /* how many of either there have been */
        uint32_t wanted_from_any;
        int64_t eager_bytes;
        spinning spin;
        _Atomic uint32_t waits;
        _Atomic uint32_t waiters; /* threads that wait for a message, and keep all going */
    } messages;

    struct { /* progress_thread.c */
        _Atomic bool has_thread;
        pthread_t thread;
        _Atomic uint32_t stops;
        _Atomic uint32_t parked;
    } progress_thread;

    struct {                       /* deadlock.c, under the lock of the messages */
        const un_message *message; /* what our note says we wait for */
        uint32_t notes;            /* how many notes we left */
        uint64_t cycle;            /* the one seen last; 0: none */
    } waiting;

    pthread_mutex_t note_lock; /* records.c: of the notes that we leave */

    struct { /* blocks.c, under its lock */
        pthread_mutex_t lock;
        un_block *first;
        _Atomic uint32_t count;
        uint32_t readers; /* calls under way that may use any of them */
    } blocks;

    struct { /* reading.c */
        uint64_t proof;
        flag_t count; /* of the reads so far */
    } reading;

    struct { /* copiers.c, offered with the call lock */
        int wanted, running;
        uint64_t offers;
        pthread_t threads[COPIERS_MOST];
        _Atomic uint32_t bell;
        _Atomic uint32_t asleep;
        _Atomic bool stopping;
        un_status (*run)(const void *what, size_t offset, size_t bytes);
        const void *what;
        size_t bytes, step;
        _Alignas(LINE_BYTES) _Atomic uint64_t offer;
        _Alignas(LINE_BYTES) _Atomic uint32_t done; /* pieces of it */
        _Atomic un_status status;
    } copiers;

    struct {                 /* watcher.c, under its lock */
        struct peer **peers; /* the processes of the other ranks */
        bool is_watched;
        struct flag *flags; /* of a GPU that waits for ranks; NULL: none */
        un_group *next;
    } watching;
};

_Static_assert(offsetof(un_group, segment.fifo_offset) == LINE_BYTES, "the first line is hot");
_Static_assert(offsetof(un_group, worker.queue_lock) == offsetof(un_group, calls) + LINE_BYTES,
               "and so is that of the calls");

static inline bool is_elsewhere(const un_group *g, int rank) {
    return g->reach && g->reach->where[rank] != HERE;
}

/* Whether this rank receives from `rank` and writes its mirror. */
static inline bool is_heard_here(const un_group *g, int rank) {
    return g->reach && g->reach->where[rank] == HEARD;
}

static inline control *control_of(const un_group *g, int rank) {
    return (control *)(g->segment.base + PAGE_BYTES + (size_t)rank * g->segment.control_bytes);
}

static inline descriptor *descriptor_of(const un_group *g, int rank, uint64_t call) {
    return &control_of(g, rank)->descriptors[call & 1];
}

/* Whether `rank` has opened its channel to each rank. */
static inline flag_t *opened_by(const un_group *g, int rank) {
    return (flag_t *)(control_of(g, rank)->sizes + 4 * (size_t)g->ranks);
}

static inline channel *channel_of(const un_group *g, int from, int to) {
    size_t number = (size_t)from * (size_t)g->ranks + (size_t)to;
    return (channel *)(g->segment.base + g->segment.channel_offset) + number;
}

static inline fifo *fifo_of(const un_group *g, int from, int to) {
    size_t number = (size_t)from * (size_t)g->ranks + (size_t)to;
    return (fifo *)(g->segment.base + g->segment.fifo_offset) + number;
}

/* Messages and replies that `rank` had sent to each rank, then those it had received. */
static inline uint64_t *traffic_of(const un_group *g, int rank) {
    return control_of(g, rank)->sizes + 5 * (size_t)g->ranks;
}

/* The table of bytes that `rank` sends to (second half: receives from) each rank. */
static inline uint64_t *sizes_of(const un_group *g, int rank, uint64_t call) {
    return control_of(g, rank)->sizes + (call & 1) * 2 * (size_t)g->ranks;
}

static inline size_t sizes_bytes(const un_group *g) {
    return 2 * (size_t)g->ranks * sizeof(uint64_t);
}

static inline char *slot_of(const un_group *g, int rank, uint64_t call, size_t step) {
    size_t slot = (size_t)rank * 2 * SLOTS + (call & 1) * SLOTS + step % SLOTS;
    return g->segment.base + g->segment.data_offset + slot * SLOT_BYTES;
}

static inline size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

void abort_group(un_group *g, un_status status, int rank, uint64_t call);
bool take_abort(un_group *g, uint64_t word); /* of another host; false: there is one already */
void wake_everyone(un_group *g);
COLD void abort_unfit(un_group *g, int sender, uint64_t handle);
COLD uint64_t unfit_handle(const un_group *g, int *receiver);
bool group_is_inherited(const un_group *g);
un_status fail(un_group *g, un_status status, int rank);
un_status fail_from_abort(un_group *g);
un_status interrupt(un_group *g, uint64_t call); /* in a call that only we can continue */
un_status status_from_abort(const un_group *g);  /* UN_OK: the group works */

#endif
