/* What the engine's files share: the segment's layout, the group, and waiting.
 *
 * segment, memory       one block of shared memory; what the machine and the cgroup leave us
 * group, watcher        a membership, and how a group ends; the deaths of peers
 * wait                  look, give the core away, sleep
 * call, collectives     one call from post to end; what each collective brings, combines and takes
 * constants             in what pieces, from which sizes on, and how long to look before sleeping
 * blocks, direct        memory that all ranks have mapped; calls that need no slots for it
 * schedules             all_reduce by a schedule that the caller passes
 * stream                user memory, strided or in many tensors, as one row of bytes
 * reduce, kernels       arithmetic, once per instruction set, and the choice among them
 * worker                the call lock, and works that go on by themselves
 * messages, channels,   point to point: waiting for messages, how they go from rank to rank,
 *   send, receive,        the steps of both sides, what waits for what by source and tag,
 *   matching, courier,    the thread for messages that nobody waits for,
 *   deadlock              cycles of ranks that wait for each other
 * records               what every call leaves behind, and notes for peers
 */
#ifndef UNISONO_INTERNAL_H
#define UNISONO_INTERNAL_H

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "constants.h"
#include "unisono.h"

#define LINE_BYTES 64
#define PAGE_BYTES 4096
#define POST_BYTES 1536 /* a post with what fits beside it */
#define SLOTS 4         /* turns of a call that may be under way at once, see collectives.c */
#define SLOT_BYTES (256 * 1024)
#define ENTRIES 256             /* messages of a channel that may be announced and not yet read */
#define RING_BYTES (256 * 1024) /* of a large message that may be under way */

#define TUBE_BYTES (256 * 1024) /* of a schedule's data between two ranks that may be under way */
#define RECORDS 1024            /* calls of a rank that are remembered */
#define SITES 128               /* lines of its program whose text is kept at once */

#define COLD __attribute__((cold)) /* for failures: kept out of the way of calls that are all right */

typedef _Atomic uint64_t flag_t;

/* Without any order: for words whose order another word gives, or that are only hints. */
static inline uint64_t read_word(const flag_t *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

static inline void write_word(flag_t *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_relaxed);
}

/* What a rank is about to do. `call` is written last (release) and read first (acquire): whoever
 * sees the number sees the rest; only error texts look at the rest of a call that is not theirs,
 * for which it is atomic too. A rank uses its two posts alternately: when it runs one call
 * ahead, it leaves alone what slower peers still read. Small contributions are in the payload. */
typedef struct post {
    flag_t call;
    flag_t signature;
    flag_t bytes;
    flag_t hash;
    char payload[POST_BYTES - 32];
} post;

/* A message that its sender announces; see channels.c. `number` is written last, and says which
 * message of the channel stands here. */
typedef struct entry {
    _Alignas(LINE_BYTES) flag_t number;
    flag_t handle; /* by which the sender finds the message when it is answered; 0: never */
    flag_t tag;
    flag_t bytes;
    _Atomic un_dtype dtype;
    char payload[280]; /* a message that fits */
} entry;

typedef struct reply { /* to one of them; `number` counts replies and is written last */
    flag_t number;
    flag_t word;
} reply;

typedef struct channel { /* from one rank to another; allocated at the first message */
    _Alignas(LINE_BYTES) flag_t written; /* the sender's line: bytes that it put into the ring, */
    flag_t heard;                        /* replies that it read */
    _Alignas(LINE_BYTES) flag_t read;    /* the receiver's: bytes that it took from the ring, */
    flag_t taken;                        /* entries that it read */
    _Alignas(LINE_BYTES) reply replies[ENTRIES]; /* the receiver's */
    _Alignas(PAGE_BYTES) entry entries[ENTRIES];  /* the sender's, and the ring */
    char ring[RING_BYTES];
} channel;

/* Bytes from one rank to another, in the order in which they were written; see schedules.c. */
typedef struct tube {
    _Alignas(LINE_BYTES) flag_t written; /* the sender's line: bytes so far, over all calls */
    _Alignas(LINE_BYTES) flag_t read;    /* the receiver's */
    _Alignas(LINE_BYTES) char ring[TUBE_BYTES];
} tube;

typedef struct tube_ends { /* of the tubes to and from one rank */
    uint64_t written, read;
    bool ready; /* ours to it has memory */
} tube_ends;

/* What a call or a message leaves behind; see records.c. The first word is written last. */
typedef struct record {
    flag_t number;
    flag_t call;      /* its number; of a message, its tag */
    flag_t signature; /* as in a post; a message's root is its peer */
    flag_t bytes;     /* that this rank gives, or takes where it gives nothing */
    flag_t arrived, started, ended; /* in ticks */
    _Atomic uint32_t state; /* below; of a failure, the status in the upper half */
    _Atomic uint32_t site; /* its number, and above it the step in which the call was made */
} record;

enum record_state { QUEUED = 1, ARRIVED, MOVING_DATA, FINISHED, FAILED };
enum { SITE_BITS = 12 }; /* of its number; sites so far apart have other texts by then */

typedef struct site_text { /* of the site with this number; another may replace it */
    flag_t number;
    char text[120];
} site_text;

typedef struct note { /* `about` is written last */
    flag_t about;
    char text[UN_TEXT_BYTES];
} note;

typedef struct identity { /* who a rank is, for readers of the segment */
    un_moment opened;
    int32_t pid;
    int32_t global_rank;
    char group_name[104];
} identity;

/* One rank's control block; each line has one writer, `sleepers` and the doorbell aside. */
typedef struct control {
    _Alignas(LINE_BYTES) flag_t progress; /* turns finished, over all calls */
    _Alignas(LINE_BYTES) _Atomic uint32_t sleepers;
    _Alignas(LINE_BYTES) _Atomic uint32_t closed;
    _Atomic uint32_t core; /* where we last fell asleep, and 1; 0: nowhere yet */
    flag_t works;          /* how many we have submitted */
    _Alignas(LINE_BYTES) _Atomic uint32_t doorbell; /* rung when a message of ours may go on */
    _Atomic uint32_t listeners;
    _Alignas(LINE_BYTES) flag_t waiting; /* what we wait for, see deadlock.c */
    flag_t waiting_tag;
    flag_t unmatched; /* messages of that peer which are here and have another tag, */
    flag_t unmatched_tag; /* and the tag of the oldest */
    flag_t writing; /* the call in which we write into our peers' memory, see direct.c */
    _Alignas(LINE_BYTES) flag_t asked; /* a peer wants to know where we are: in which call of its */
    _Alignas(LINE_BYTES) note notes[UN_NOTES];
    _Alignas(LINE_BYTES) post posts[2];
    _Alignas(LINE_BYTES) identity identity;
    _Alignas(LINE_BYTES) record records[RECORDS];
    _Alignas(LINE_BYTES) site_text sites[SITES];
    uint64_t sizes[]; /* two tables: bytes to, then bytes from each rank; then open channels */
} control;

typedef struct header {
    uint64_t magic;
    uint32_t version;
    uint32_t ranks;
    uint64_t nonce;
    uint32_t cores;
    _Alignas(LINE_BYTES) flag_t abort; /* 0, or status, rank and call of the first fault */
} header;

/* Messages or receives by source and tag, those of the same in their order: see matching.c. */
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

/* For how long it pays off to spin before one sleeps. */
typedef struct spinning {
    int64_t ns;
    uint32_t short_ones;   /* since the last time that we tried for longer, */
    uint32_t before_trial; /* and how many there are to be */
    bool is_trial;
} spinning;

/* One rank's membership in a group, as its process knows it. Each part has the file that owns it.
 * What every call touches lies in two cache lines: the first one, and `calls` with what follows. */
struct un_group {
    _Alignas(LINE_BYTES) int rank;
    int ranks;
    bool crowded;     /* more ranks than cores: waiting must give the core away */
    bool roomy;       /* a core for every rank's worker too */
    bool is_part;     /* of a larger group, whose calls are recorded instead of this one's */
    bool is_covered;  /* for a while: a call is under way that is recorded as a whole */
    unsigned process; /* which process opened it, see group.c */

    struct { /* segment.c */
        char *base;
        header *header;
        size_t control_bytes, data_offset, channel_offset, tube_offset;
        size_t bytes;
        _Atomic uint32_t *users; /* memberships of this process over this mapping */
        int descriptor;
        bool slice_ready;
    } segment;

    _Alignas(LINE_BYTES) struct { /* call.c and collectives.c, with the call lock */
        flag_t latest;        /* the number of the latest call; any thread may read it */
        uint64_t turns;       /* of moving data, finished before it */
        flag_t noticed_end;   /* the latest call when we learnt that the group is over, and 1 */
        const void **sources; /* scratch: for each rank, where its part of a reduction lies, */
        size_t *post_pitch;   /* and how far apart its parts are in its post; 0: in slots */
    } calls;

    flag_t recorded; /* records.c: how many records so far */

    struct { /* worker.c: who may be in a call, and what was submitted */
        _Atomic uintptr_t owner; /* the thread that has the call lock; never half new */
        _Atomic uint32_t call_lock;
        _Atomic uint32_t queued;
        pthread_mutex_t queue_lock;
        un_work *first, *last;
        struct execution *begun; /* of the first one, if that has begun; with the call lock */
        _Atomic uint32_t may_rest; /* there is no other, and who waits for it carries it out */
        _Atomic uint32_t finished; /* works so far */
        _Atomic bool has_thread;
        pthread_t thread;
        _Atomic uint32_t bell;
        _Atomic uint32_t asleep;
        _Atomic uint32_t stopping;
    } worker;

    size_t cut_from, direct_from; /* by constants.h */

    spinning spin; /* wait.c, with the call lock */

    tube_ends *tubes; /* schedules.c: one per rank */

    struct { /* messages.c, channels.c, send.c, receive.c: under its lock */
        pthread_mutex_t lock;
        un_message *oldest, *newest; /* of all that are under way */
        struct traffic *traffic;     /* one per rank */
        match_table wanted;          /* receives without a message, */
        match_table unmatched;       /* and messages that no receive has asked for */
        uint64_t matches;            /* how many of either there were so far */
        uint32_t wanted_from_any;
        int64_t eager_bytes;
        spinning spin;
        _Atomic uint32_t waits;
        _Atomic uint32_t waiters; /* threads that wait for a message, and keep all going */
    } messages;

    struct { /* courier.c */
        _Atomic bool has_thread;
        pthread_t thread;
        _Atomic uint32_t stops;
        _Atomic uint32_t parked;
    } courier;

    struct { /* deadlock.c, under the lock of the messages */
        const un_message *message; /* what we said that we wait for */
        uint32_t notes;            /* how often we said so */
        uint64_t cycle;            /* the one seen last; 0: none */
    } waiting;

    pthread_mutex_t note_lock; /* records.c: of the notes that we leave */

    struct { /* blocks.c, under its lock */
        pthread_mutex_t lock;
        un_block *first;
        _Atomic uint32_t count;
        uint32_t readers; /* calls under way that may use any of them */
    } blocks;

    struct { /* watcher.c, under its lock */
        struct peer **peers; /* the processes of the other ranks */
        bool is_watched;
        struct flag *flags; /* of a GPU that waits for ranks; NULL: none */
        un_group *next;
    } watching;
};

_Static_assert(offsetof(un_group, segment.bytes) == LINE_BYTES, "the first line is hot");
_Static_assert(offsetof(un_group, worker.queue_lock) == offsetof(un_group, calls) + LINE_BYTES,
               "and so is that of the calls");

static inline control *control_of(const un_group *g, int rank) {
    return (control *)(g->segment.base + PAGE_BYTES + (size_t)rank * g->segment.control_bytes);
}

static inline post *post_of(const un_group *g, int rank, uint64_t call) {
    return &control_of(g, rank)->posts[call & 1];
}

/* Whether `rank` has opened its channel to each rank. */
static inline flag_t *opened_by(const un_group *g, int rank) {
    return (flag_t *)(control_of(g, rank)->sizes + 4 * (size_t)g->ranks);
}

static inline channel *channel_of(const un_group *g, int from, int to) {
    size_t number = (size_t)from * (size_t)g->ranks + (size_t)to;
    return (channel *)(g->segment.base + g->segment.channel_offset) + number;
}

static inline tube *tube_of(const un_group *g, int from, int to) {
    size_t number = (size_t)from * (size_t)g->ranks + (size_t)to;
    return (tube *)(g->segment.base + g->segment.tube_offset) + number;
}

/* The table of bytes that `rank` sends to (or, second half, takes from) each rank. */
static inline uint64_t *sizes_of(const un_group *g, int rank, uint64_t call) {
    return control_of(g, rank)->sizes + (call & 1) * 2 * (size_t)g->ranks;
}

static inline char *slot_of(const un_group *g, int rank, uint64_t call, size_t turn) {
    size_t slot = (size_t)rank * 2 * SLOTS + (call & 1) * SLOTS + turn % SLOTS;
    return g->segment.base + g->segment.data_offset + slot * SLOT_BYTES;
}

static inline size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

/* wait.c */
typedef struct patience { /* how long one call still waits, and whom it asks meanwhile */
    const un_call *call;
    int64_t deadline_ns; /* 0: no clock read yet */
    bool blocked;        /* the caller knows that we wait */
    bool asked;          /* the missing know that we miss them */
    bool may_leave;      /* if the caller is interrupted, another thread goes on from here */
    bool may_finish;     /* no longer, but what is left will soon be over */
    int64_t leaves_ns;   /* the caller has been interrupted, and waits until then at most */
} patience;

int64_t clock_ns(void);
void sleep_ns(int64_t ns);

/* Sleep while a word is `seen`, for so long at most; wake so many who do. Words of the segment are the
 * ranks' own, others this process's. Cold, so that calls that find nobody asleep run straight on. */
enum whose { OF_RANKS, OF_PROCESS };
COLD void sleep_on(const void *word, enum whose whose, uint32_t seen, int64_t ns);
COLD void wake(const void *word, enum whose whose, int most);

void start_spinning(spinning *s);
int64_t begin_spin(un_group *g, spinning *s, int peer); /* for so long; -1: no peer in particular */
void end_spin(const un_group *g, spinning *s, bool paid_off);
void note_core(un_group *g); /* before we sleep */
void prepare_to_block(patience *p);
un_status await_slowly(un_group *g, int peer, const flag_t *flag, uint64_t target, patience *p);

static inline void relax_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

/* Wait until a peer's flag has reached `target`. The acquire pairs with the release in publish:
 * what the peer wrote before it published is visible afterwards. */
static inline un_status await_flag(un_group *g, int peer, const flag_t *flag, uint64_t target,
                                   patience *p) {
    for (int spins = 0; spins < 16; spins++)
        if (atomic_load_explicit(flag, memory_order_acquire) >= target) return UN_OK;
    return await_slowly(g, peer, flag, target, p);
}

/* Raise one of our own flags. Sequentially consistent on purpose: the store must not pass the
 * load of `sleepers`, or a peer that falls asleep in between is never woken (await_slowly does
 * the same two steps in the other order). */
static inline void publish(un_group *g, flag_t *flag, uint64_t value) {
    atomic_store_explicit(flag, value, memory_order_seq_cst);
    if (atomic_load_explicit(&control_of(g, g->rank)->sleepers, memory_order_seq_cst))
        wake(flag, OF_RANKS, INT_MAX);
}

typedef struct unfinished { /* what is under way when the group closes */
    bool any;
    bool moving;    /* every member has begun some of it */
    uint64_t moved; /* another number whenever something has moved */
    bool *missing;  /* the ranks that have not begun the rest */
} unfinished;

/* group.c */
bool start_thread(pthread_t *thread, void *(*body)(void *), void *argument);
unsigned current_process(void);
void abort_group(un_group *g, un_status status, int rank, uint64_t call);
COLD void abort_unfit(un_group *g, int sender, uint64_t handle);
COLD uint64_t unfit_handle(const un_group *g, int *receiver);
COLD void write_shape_note(un_group *g, const char *before, const un_shape *shape, uint64_t number);
bool group_is_inherited(const un_group *g);
un_status fail(un_group *g, un_status status, int rank);
un_status fail_from_abort(un_group *g);
void end_if_unfinished(un_group *g, bool unfinished);
un_status interrupt(un_group *g, uint64_t call); /* the group, in a call that only we can go on with */
un_status status_from_abort(const un_group *g); /* UN_OK: the group is well */

/* segment.c */
size_t control_bytes_for(int ranks);
un_status segment_map(un_group *g, int descriptor, uint64_t nonce);
un_status segment_share(un_group *g, const un_group *other);
void segment_unmap(un_group *g);
un_status prepare_slice(un_group *g);           /* this rank's data area, on first need */
un_status prepare_channel(un_group *g, int to); /* likewise its channel to a rank, once */
un_status prepare_tube(un_group *g, int to);    /* likewise its tube */

int nameless_file(size_t bytes);
int allocate(int descriptor, size_t offset, size_t bytes);
bool allocate_if_room(un_group *g, int descriptor, size_t offset, size_t bytes);

/* blocks.c */
typedef struct place { /* of bytes in a rank's own part of a block */
    uint64_t block, offset;
} place;
bool find_place(un_group *g, const char *data, size_t bytes, place *found);
void begin_reading(un_group *g); /* until end_reading every block stays mapped */
char *address_of(un_group *g, int rank, place where, size_t bytes); /* NULL: there is no such */
void end_reading(un_group *g);
void leave_blocks(un_group *g); /* the group closes */

/* records.c */
uint64_t open_record(un_group *g, uint64_t signature, uint64_t bytes, uint64_t call,
                     const un_site *site, enum record_state state);
void record_call(un_group *g, uint64_t number, uint64_t call); /* out of the queue */
void record_start(un_group *g, uint64_t number);
void record_end(un_group *g, uint64_t number, un_status status);
uint64_t signature_of(un_operation operation, un_reduction reduction, int root, un_dtype dtype);
void ask_where(un_group *g, int rank, uint64_t call);
bool is_asked(const un_group *g);
void answer_where(un_group *g, const char *text);

/* channels.c, courier.c */
bool make_traffic(un_group *g);
void free_traffic(un_group *g);
void look_at_messages(un_group *g, unfinished *left);
void stop_courier(un_group *g);
bool has_unread_messages(const un_group *g, int from, int to);
bool has_unread_replies(const un_group *g, int from, int to);

/* deadlock.c: with the message lock */
void note_waiting(un_group *g, const un_message *m, bool alone);
void forget_waiting(un_group *g);
void find_deadlock(un_group *g, const un_message *m);

/* worker.c */
un_status lock_calls(un_group *g, patience *p);
void unlock_calls(un_group *g);
bool run_queue(un_group *g, const un_work *last, const un_call *hooks, bool may_leave);
void look_at_works(un_group *g, unfinished *left);
void stop_worker(un_group *g);

/* watcher.c */
void stop_watching(un_group *g);
void forget_watching_after_fork(void);
bool peer_is_dead(const un_group *g, int rank, int64_t *ending);

/* stream.c */
char *stream_direct(const un_stream *s, size_t offset, size_t bytes);
void stream_read(char *to, const un_stream *s, size_t offset, size_t bytes);
void copy_twice(char *restrict near, char *restrict far, const char *restrict from, size_t bytes);
void stream_write(const un_stream *s, size_t offset, const char *from, size_t bytes, bool large);

/* kernels.c */
typedef void kernel(void *to, const void *const *from, int sources, size_t count, double factor);
typedef struct reducer {
    kernel *run; /* NULL: the reduction has no meaning for the type */
    size_t unit; /* bytes that count as one element for `run` */
} reducer;
reducer find_reducer(un_dtype dtype, un_reduction reduction);
enum { DIVISION = UN_REDUCTIONS, KERNELS }; /* not a reduction: one source, divided by `factor` */

#endif
