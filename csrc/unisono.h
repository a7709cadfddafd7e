/* The engine's contract: collectives between processes, over shared memory on one host and over UCX
 * between hosts.
 *
 * A segment is one block of shared memory. Its creator sizes it with un_segment_create and hands
 * the descriptor to the other members; every member then opens it with un_group_open under its
 * own rank. All members run the same calls in the same order with un_run. No Python, no torch.
 */
#ifndef UNISONO_H
#define UNISONO_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define UN_LAYOUT_VERSION 16u /* two builds may share a segment only if this is equal */
#define UN_MAX_RANKS 1024
#define UN_TEXT_BYTES 248 /* of a note, with its final zero */

typedef enum un_status {
    UN_OK = 0,
    UN_MISMATCH,    /* the ranks called different things */
    UN_TIMEOUT,     /* a peer did not come before the deadline */
    UN_PEER_CLOSED, /* a peer closed the group while it was needed */
    UN_ABORTED,     /* a member ended the group */
    UN_INTERRUPTED, /* the caller's pause function asked to stop */
    UN_REFUSED,     /* the call is invalid; all ranks refused it, and the group still works */
    UN_NO_MEMORY,   /* a memory limit leaves no room for this rank's slice */
    UN_CLOSED,      /* the group was closed in this process */
    UN_FORKED,      /* the group belongs to the process that forked this one */
    UN_SYSTEM,      /* a system call failed; un_failure.detail holds errno */
    UN_REENTERED,   /* the thread is already in a call of this group */
    UN_NOT_YET,     /* a work had not finished when the wait for it ended */
    UN_UNFIT,       /* a message has another type or size than its receive */
    UN_DEADLOCK,    /* ranks wait for each other's messages in a cycle */
    UN_PEER_LOST,   /* a peer's process ended; un_failure.detail says how, if known */
    UN_DAMAGED,     /* a peer's data in the segment is malformed: something overwrote it */
} un_status;

typedef enum un_operation {
    UN_BARRIER = 1,
    UN_ALL_REDUCE,
    UN_REDUCE,
    UN_BROADCAST,
    UN_ALL_GATHER,
    UN_REDUCE_SCATTER,
    UN_GATHER,
    UN_SCATTER,
    UN_ALL_TO_ALL,
    UN_SEND, /* messages, in records */
    UN_RECV,
    UN_ALLOCATE,  /* as UN_ALL_GATHER: what ranks exchange when they make a block */
    UN_NEW_GROUP, /* in records: another library makes a group; `bytes` names its members */
} un_operation;

typedef enum un_reduction {
    UN_SUM = 0,
    UN_AVG,
    UN_PRODUCT,
    UN_MIN,
    UN_MAX,
    UN_BAND,
    UN_BOR,
    UN_BXOR,
    UN_PREMUL_SUM,    /* the sum of un_call.factor times each contribution */
    UN_TRUNCATED_AVG, /* as UN_AVG, also of integers: their sum divided, towards zero */
    UN_REDUCTIONS,
} un_reduction;

/* How sums cross from one host to another, where not as they are: see codes.h. */
typedef enum un_wire { UN_WIRE_FULL, UN_WIRE_INT8, UN_WIRE_FP8, UN_WIRE_BFLOAT16 } un_wire;

/* The form of a reduction, as bits, which must be equal on all ranks; they are posted above the four
 * bits of the reduction itself. */
typedef enum un_form {
    UN_REPRODUCIBLE = 1,  /* the bits depend on the contributions alone: see tree.c */
    UN_CONTRIBUTIONS = 2, /* the same, and each rank brings so many as it likes */
} un_form;
enum { UN_FORM_SHIFT = 4, UN_WIRE_SHIFT = 2 }; /* above them in the form: a un_wire */
static inline un_wire un_wire_of(unsigned form) { return (un_wire)(form >> UN_WIRE_SHIFT & 3); }

static inline bool un_reduces(un_operation operation) {
    return operation == UN_ALL_REDUCE || operation == UN_REDUCE || operation == UN_REDUCE_SCATTER;
}
static inline bool un_averages(un_reduction reduction) {
    return reduction == UN_AVG || reduction == UN_TRUNCATED_AVG;
}
static inline bool un_is_rooted(un_operation operation) {
    return operation == UN_REDUCE || operation == UN_BROADCAST || operation == UN_GATHER ||
           operation == UN_SCATTER;
}

static inline bool un_is_wide_input(un_operation o) {
    return o == UN_REDUCE_SCATTER || o == UN_SCATTER || o == UN_ALL_TO_ALL;
}
static inline bool un_is_wide_output(un_operation o) {
    return o == UN_ALL_GATHER || o == UN_GATHER || o == UN_ALL_TO_ALL || o == UN_ALLOCATE;
}

/* An element type as DLPack writes it: code, bits and lanes in one integer. */
typedef uint32_t un_dtype;
enum { UN_INT = 0, UN_UINT = 1, UN_FLOAT = 2, UN_BFLOAT = 4, UN_COMPLEX = 5, UN_BOOL = 6 };
static inline un_dtype un_dtype_of(unsigned code, unsigned bits, unsigned lanes) {
    return code | bits << 8 | lanes << 16;
}

/* How a strided tensor lies in memory: outermost dimension first, strides in bytes. */
typedef struct un_layout {
    int dims;
    size_t item_bytes;
    struct un_dim {
        size_t length;
        ptrdiff_t stride_bytes;
    } dim[];
} un_layout;

/* One tensor, or an evenly cut part of one. */
typedef struct un_view {
    char *data;              /* first byte of the tensor; of the part where layout is NULL */
    const un_layout *layout; /* NULL: contiguous */
    size_t first_byte;       /* with a layout: where the part starts in the flattened tensor */
    size_t bytes;
    size_t start; /* where this view starts in its stream */
} un_view;

/* What one rank sends or receives: views, one after the other, as one sequence of bytes. */
typedef struct un_stream {
    const un_view *views;
    size_t count;
    size_t bytes;
} un_stream;

/* A line of the caller's program, for records and error texts; it must outlive its calls. */
typedef struct un_site {
    uint32_t number; /* unique; its lower 12 bits, which records hold, are never 0 */
    char text[UN_TEXT_BYTES];
} un_site;

/* What one rank does in an all_reduce or a broadcast by a schedule (docs/schedules.md). The
 * tensor is cut into chunks; a rank's sends of a round read the data from before its receives of
 * that round. Both ends have a move in the same round. */
typedef enum un_action { UN_PUT, UN_COPY, UN_COMBINE } un_action; /* a send; two kinds of receive */

typedef struct un_move { /* `count` chunks from `chunk` on, to or from `peer` */
    int64_t action, peer, chunk, count;
} un_move;

typedef struct un_compiled_schedule {
    uint64_t hash; /* of the whole schedule, so that ranks detect if they differ */
    int64_t rounds, chunks;
    int64_t busiest;       /* the most chunks that any rank sends to any other in all rounds */
    const int64_t *starts; /* the sends of round r are the moves from starts[2 * r] on, */
    const un_move *moves;  /* its receives those from starts[2 * r + 1] to starts[2 * r + 2] */
} un_compiled_schedule;

/* The most that `busiest` may be. */
#define UN_BUSIEST 8192

/* A tensor's shape, for error texts; longer ones are cut short. */
enum { UN_SHAPE_DIMS = 8 };
typedef struct un_shape {
    int dims;
    int64_t length[UN_SHAPE_DIMS];
} un_shape;

typedef struct un_call {
    un_operation operation;
    un_reduction reduction;
    unsigned form;          /* of a reduction, see un_form */
    uint32_t contributions; /* in UN_CONTRIBUTIONS, how many follow each other in an input */
    float *residual; /* with a wire format, what it has lost here, for each element; or NULL */
    un_dtype dtype;
    int root;
    double factor;
    uint64_t shape_hash;   /* of all else that must be equal on all ranks */
    uint32_t shape_mark;   /* of the tensors' shapes, where they are compared; 0: unknown */
    const un_shape *shape; /* of the first tensor; NULL: unknown */
    const un_compiled_schedule *schedule; /* or NULL: the engine's own algorithm */
    const un_stream *input;  /* one stream, or one for each rank on a wide side; may be NULL */
    const un_stream *output; /* the same */
    const un_site *site;     /* NULL: not known */
    int64_t timeout_ns;
    void (*block)(void *); /* called before the first wait of more than a moment; may be NULL */
    int (*pause)(void *);  /* then called at least every 50 ms; non-zero: stop. May be NULL */
    void *argument;        /* of both */
} un_call;

/* An all_gather or a gather of data whose length only its owner knows: heads, all of the same
 * length of at most UN_HEAD_BYTES, and each rank's tail, if it is short enough to come along. */
enum { UN_HEAD_BYTES = 128, UN_MOST_ALONG = 128 * 1024 };
typedef struct un_ragged {
    un_call call; /* `input` is the tail, for its record */
    un_stream head, tail;
    bool comes_along; /* our tail does; it has at most UN_MOST_ALONG bytes */
    un_stream *heads; /* where all heads go */
    /* Called when all heads have arrived: where each tail goes, or NULL to take none. A rank's
     * tail has as many bytes as its stream here, and must have come along. */
    const un_stream *(*open)(const struct un_ragged *ragged);
} un_ragged;

/* An asynchronous call. It and all that it points to must live until it is done. */
typedef struct un_work {
    un_call call;
    un_status status; /* once done */
    _Atomic uint32_t state;
    bool begun; /* its call is posted */
    uint64_t record;
    uint64_t number; /* among the works of this rank */
    struct un_work *next;
} un_work;

/* An entry of a table of messages or receives that wait for each other. */
typedef struct un_match {
    struct un_match *next;
    uint64_t number; /* lower is older */
    int64_t tag;
    int source; /* -1: any */
} un_match;

/* A message. The same rules as for a work. */
typedef struct un_message {
    bool sends;
    int peer; /* destination, or for a receive the source; -1: any source */
    int64_t tag;
    un_dtype dtype;
    un_stream stream;
    const un_site *site;
    const un_shape *shape; /* for error texts; NULL: unknown */
    int64_t timeout_ns;    /* a wait without its own timeout ends the group after this */
    un_status status;      /* once done */
    int source;            /* the sender */
    uint64_t seen_bytes;
    un_dtype seen_dtype;
    _Atomic uint32_t done;
    int phase; /* the rest is the engine's */
    uint64_t record;
    bool is_started;  /* rather than run: its owner may do other work meanwhile */
    bool is_copy;     /* of an eager send: no thread waits for it */
    bool is_expected; /* a receive's: its sender on another host knows of it */
    uint64_t handle;  /* a receive's: the sender's handle of the message */
    size_t moved;
    struct moving *moving; /* between hosts: its data in transit */
    un_match match;
    struct un_message *previous, *next; /* of all */
    struct un_message *behind;          /* in one of the queues of a channel */
} un_message;

/* What a rank waits for. */
typedef struct un_waiting {
    bool waits;
    bool sends;
    bool is_started; /* so that its owner could also have waited later */
    bool alone;      /* the rank has no other messages that peers could wait for */
    int peer;
    int64_t tag;
    uint64_t unmatched;    /* a receive: messages of that peer with other tags that arrived, */
    int64_t unmatched_tag; /* and the tag of the oldest */
} un_waiting;

/* What a rank posted for a call, for error texts. */
typedef struct un_posted {
    uint64_t call;     /* the latest call that the rank posted there */
    un_status refused; /* why; UN_OK: not refused */
    un_operation operation;
    unsigned reduction; /* with its form */
    un_dtype dtype;
    int root;
    uint64_t bytes;
    uint64_t hash;
} un_posted;

/* The group as this rank sees it: its own calls, how often the kernel has read for it, the segment's
 * descriptor; and a rank, with what it posted in the place of a call. Zeros in a forked child. */
typedef struct un_state {
    uint64_t calls, reads;
    int descriptor;
    bool has_closed, is_lost; /* the rank has left; its process has ended, */
    int64_t ending;           /* in this way: the detail of a un_failure */
    uint64_t progress;        /* steps of moving data that it has finished, over all calls */
    un_waiting waiting;
    un_posted posted;
    const uint64_t *sizes; /* of a gather, scatter or all_to_all: bytes to, then from each rank */
} un_state;

typedef struct un_failure {
    un_status status;
    int rank; /* the cause, or -1 */
    uint64_t call;
    int64_t detail; /* UN_SYSTEM: errno; UN_PEER_LOST: 0, or UN_ENDING_KNOWN and a wait status;
                       UN_UNFIT: the rank that received what `rank` sent */
} un_failure;

#define UN_ENDING_KNOWN ((int64_t)1 << 32)
#define UN_ENDING_SILENT ((int64_t)1 << 33) /* of a rank on another host: it no longer answers */

typedef struct un_group un_group;

/* Make a segment for `ranks` members, of which `cores` can run at once. `nonce` proves to the
 * members that they opened this segment. Returns a descriptor, or -1 with errno. */
int un_segment_create(int ranks, int cores, uint64_t nonce);

/* Become rank `rank` of the group. The descriptor stays the caller's. Returns UN_OK, UN_SYSTEM
 * with errno, or UN_MISMATCH if the segment has another build, nonce or size. */
un_status un_group_open(int descriptor, int rank, int ranks, uint64_t nonce, un_group **group);

/* Become another rank of `other`'s group in this process, over the same mapping, which is freed
 * with the last of them. So ranks can be threads of one process, and tools that check one
 * process's memory see a whole group. The memberships are independent. */
un_status un_group_open_beside(const un_group *other, int rank, un_group **group);

/* -- several hosts: see hosts.h ----------------------------------------------------------------- */

/* Load UCX from this path; returns NULL, or what failed. Then create this process's one UCX
 * worker with these settings (names and values, NULL at the end), and return its address. It is
 * closed with the last group over hosts that needs it. */
const char *un_ucx_load(const char *path, unsigned version[3]);
const char *un_network_open(const char *const *settings, const void **address, size_t *bytes);
void un_network_close(void);

/* Where the ranks of a group over hosts are, each in an array by rank. */
typedef struct un_span {
    uint64_t key;     /* equal on all ranks; unique among the groups of these processes */
    const int *hosts; /* each rank's host, numbered in the order of their lowest ranks */
    const void *const *addresses; /* of the workers of ranks on other hosts */
    const size_t *address_bytes;
    const uint64_t *own_proofs, *proofs; /* carried by all that we send to a rank, and it to us */
} un_span;

/* Extend a group, whose segment only the ranks of this host share, over several hosts; `inner`
 * is a group of those ranks, in order, and is closed with it. UN_SYSTEM: see errno. */
un_status un_group_span(un_group *group, un_group *inner, const un_span *span);

/* Wait until all ranks have done so; false: the ranks in `missing` have not, or only a missing one
 * knows of it. `asks`: those that are missing are asked themselves. */
bool un_group_meet(un_group *group, int64_t timeout_ns, const un_call *hooks, bool asks,
                   bool *missing);

/* A rank on another host has ended, or is silent; or it has ended after it left the group. */
void un_group_lose(un_group *group, int rank, bool is_silent);
void un_group_leave(un_group *group, int rank);

/* Memory that all members of a group map: a part for each rank, which this rank uses as its own. If
 * the senders of a large call have their tensors there, the others read them in place (see
 * direct.c).
 *
 * One member creates it and passes the descriptor to the others; `bytes` is the size of each
 * rank's part, equal on all. Every rank opens it and, once all have, uses it: `number`
 * identifies the block in the group. A rank that cannot open it tells the others, and all
 * release it again. The mapping stays until every rank has released the block, or the group is
 * over in this process; its memory returns to the system with the last release. */
typedef struct un_block un_block;
int un_block_create(int ranks, const uint64_t *bytes);
un_status un_block_open(un_group *group, int descriptor, const uint64_t *bytes, un_block **block);
un_status un_block_open_beside(un_group *group, un_block *other, un_block **block); /* see above */
void un_block_use(un_block *block, uint64_t number);
void un_block_release(un_block *block);
char *un_block_part(const un_block *block, int rank, size_t *bytes);

/* Undo this rank's release of block `number`, which others still hold. NULL: no such block. */
un_block *un_block_reopen(un_group *group, uint64_t number);

/* The rank whose part of a block of the group contains these bytes, or -1. */
int un_group_owner(un_group *group, const char *data, size_t bytes);

/* Watch the process of `rank`. `identity` names the process among all peers; a pidfd (or -1) is
 * needed the first time that it is seen, and stays the caller's. */
bool un_group_watch(un_group *group, int rank, uint64_t identity, int pidfd);

/* Before the first call: the most bytes of a send that is done at once; whether large calls on
 * ordinary memory may let the kernel copy it between processes where it can (reading.c), or none of
 * the ranks may; how many threads of the group take part in a large call besides the one that makes
 * it (copiers.c), -1: as many as the cores allow; and how long a rank may spin in a call before it
 * sleeps, where there are cores for all ranks, -1: as constants.h says. */
void un_group_configure(un_group *group, int64_t eager_bytes, bool may_read, int copiers,
                        int64_t spin_ns);

/* A number for each rank of a group, each on its own cache line, that a GPU waits to see grow:
 * it would wait forever for a rank that has died. So when a rank's process ends, or has ended,
 * without closing the group, its flag is raised by UN_FLAG_RELEASED. NULL: no flags. Needs
 * un_group_watch. */
#define UN_FLAG_RELEASED (UINT32_C(1) << 30)
void un_group_set_flags(un_group *group, void *flags);

/* Before we leave: finish the works and messages that every member has begun, and wait a second
 * for others to begin theirs. False: some have not, and `missing` says for each rank whether it
 * is one of them; or `hooks` asked to stop. */
bool un_group_finish(un_group *group, const un_call *hooks, bool *missing);

/* Leave. Peers that still wait for this rank fail with UN_PEER_CLOSED; if it has unfinished
 * works or messages, all do, and the group ends. */
void un_group_close(un_group *group);

/* Take part in one call. If the status is UN_MISMATCH or UN_REFUSED, the output is unchanged;
 * un_group_failure has the details. */
un_status un_run(un_group *group, const un_call *call);

/* Take part in a call whose arguments this rank refuses, so that its peers do not wait for it. */
un_status un_refuse(un_group *group, const un_call *call);

/* Submit a call, to run after those submitted before it; and wait for it, without limit if the
 * timeout is negative, otherwise until UN_NOT_YET. */
un_status un_submit(un_group *group, un_work *work);
un_status un_work_wait(un_group *group, un_work *work, const un_call *hooks);
bool un_work_done(const un_work *work);
bool un_work_test(un_group *group, un_work *work); /* the same, after doing what it can at once */

/* Whether a work will finish soon without this thread, since every rank has submitted as many
 * (UN_OK), or not yet (UN_NOT_YET). Another status: wait for it here: cores are few or no thread
 * runs it. */
un_status un_work_is_under_way(un_group *group, const un_work *work);

/* Start a message and wait for it. A send is done once it is matched and its buffer is free; a
 * small one at once if un_group_configure allows so many bytes. */
un_status un_message_start(un_group *group, un_message *message);
un_status un_message_run(un_group *group, un_message *message, const un_call *hooks);
un_status un_message_wait(un_group *group, un_message *message, const un_call *hooks);
bool un_message_done(const un_message *message);

/* How many messages of `source` (-1: any) have arrived and match no receive; the oldest's tag. */
uint64_t un_group_unmatched(un_group *group, int source, int64_t *tag);

/* End the group on every member, with a reason that they can read. */
void un_group_abort(un_group *group, const char *reason);

/* The value that the first member proposed under this serial, a number above those of earlier
 * decisions; -1: later decisions have replaced it, or this is a forked child. It does not wait,
 * makes no call, and works in a group that has ended, too: a decision outlives its rank.
 * UN_NOTHING proposes nothing and only reads: -1 if there is no proposal. Decisions of the
 * program and of the survivors of a group have separate serials. */
typedef enum un_book { UN_OF_PROGRAM, UN_OF_SURVIVORS, UN_BOOKS } un_book;
#define UN_NOTHING UINT32_MAX
int64_t un_group_decide(un_group *group, un_book book, uint32_t serial, uint32_t value);

/* Notes that a rank leaves for its peers' error texts. */
typedef enum un_note {
    UN_SITE,   /* the line of its program that made the failed call */
    UN_SHAPE,  /* the shapes of its tensors; of a mismatched message: its tag, bytes and type, those
                  of what arrived (zeros for a send), and its shape */
    UN_ANSWER, /* where it was when a peer asked */
    UN_REASON, /* why it ended the group */
    UN_COMING, /* which group it makes, or whether it joins one of the survivors, */
    UN_CHOICE, /* and who it thinks they are */
    UN_REFUSAL, /* why it refused its arguments of a call or message */
    UN_NOTES,
} un_note;

/* What a note is about: a call's number, or this for messages and for ends of a group. */
#define UN_ABOUT_MESSAGES UINT64_MAX

/* Leave a note, unless there is one about the same, or about a failed message; read a rank's
 * note, if there is one (about 0: about anything). */
void un_group_write_note(un_group *group, un_note kind, uint64_t about, const char *text);
bool un_group_read_note(const un_group *group, int rank, un_note kind, uint64_t about,
                        char text[UN_TEXT_BYTES]);

/* How this process finds out where its program is when a peer asks. It is called in a separate
 * thread, which may have to wait for the program. NULL: no answer. */
void un_set_locator(void (*locate)(char text[UN_TEXT_BYTES]));

/* Publish this rank's name, for readers of the segment from outside. */
void un_group_introduce(un_group *group, const char *name, int global_rank);

/* Where the records lie in a segment of `ranks`, for those readers; and where they can ask a
 * rank for its current line: a word to write, which the rank repeats before its answer. */
typedef struct un_layout_of_records {
    size_t first_control, control_bytes;
    size_t identity, records, record_bytes, record_count, sites, site_bytes, site_count;
    size_t asked, answer, reason;
    size_t progress, closed; /* steps that the rank has finished; whether it has left */
} un_layout_of_records;
un_layout_of_records un_records_layout(int ranks);

/* One moment by the clock of the records and by CLOCK_MONOTONIC. */
typedef struct un_moment {
    uint64_t ticks, ns;
} un_moment;
un_moment un_now(void);

/* Read a compiled schedule from its integers: hash, rounds, chunks, busiest, then starts and
 * moves. They must outlive it. False: they are invalid for this rank of `ranks`. */
bool un_schedule_read(un_compiled_schedule *schedule, const int64_t *integers, size_t count,
                      int rank, int ranks);

/* A call that another library performs: open its record, with its number (a message: its tag),
 * and close it when the call has ended (UN_NOT_YET: it may have failed). */
uint64_t un_record_open(un_group *group, const un_call *call, uint64_t bytes, uint64_t number);
void un_record_end(un_group *group, uint64_t record, un_status status);

/* While `covered`, the engine's calls leave no records: the call that consists of them has one. */
void un_record_cover(un_group *group, bool covered);

/* Compare such a call with the peers' before it begins: all ranks meet here. */
un_status un_check(un_group *group, const un_call *call, uint64_t bytes, uint64_t record);

/* This thread begins its next step, which its records carry from now on. */
void un_count_step(void);

/* How the group ended; UN_FORKED in a forked child, which is not a member. */
un_failure un_group_failure(un_group *group);
uint64_t un_group_calls(const un_group *group);
un_state un_group_state(const un_group *group, int rank, uint64_t call);

/* Run the call of an un_ragged: `call` must be its first member. */
un_status un_gather_ragged(un_group *group, const un_call *call);

/* The most bytes that a tail may have to come along: at most UN_MOST_ALONG. */
size_t un_group_most_along(const un_group *group);

/* Whether `reduction` is defined for `dtype`. */
bool un_reducible(un_dtype dtype, un_reduction reduction);

/* Replace whole pages of this process at `at` by the pages of a block at `shared`: from now on a
 * write to either shows in both; or by private ones, if `shared` is NULL. The contents at `at` are
 * kept; no other thread may write to it meanwhile. False: nothing has changed. */
bool un_share_pages(char *at, char *shared, size_t bytes);

/* Writing to it from now on is fatal: for a forked child, whose parent would see the writes. */
bool un_protect_pages(char *at, size_t bytes);

/* Write the differences between `new` and `old` to `to`, in elements of `size` bytes, and update
 * `old`. Returns the bytes written; -1: more than `room`, and part of `old` may be updated. */
ptrdiff_t un_pack_changes(char *old, const char *new, size_t bytes, size_t size, char *to,
                          size_t room);

/* Apply such changes at `at`. False: these are not changes of so many bytes. */
bool un_apply_changes(char *at, size_t bytes, size_t size, const char *from, size_t length);

/* Cores that the cgroup's CPU quota allows, rounded up; INT_MAX: no quota. */
int un_cpu_quota(void);

/* Bytes that the cgroup's limits and the machine leave free. */
int64_t un_memory_room(void);

#endif
