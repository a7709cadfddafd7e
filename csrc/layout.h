/* The segment's layout: what each rank writes, where, and who reads it. */
#ifndef UNISONO_LAYOUT_H
#define UNISONO_LAYOUT_H

#include <stdatomic.h>

#include "unisono.h"

#define LINE_BYTES 64
#define PAGE_BYTES 4096
#define DESCRIPTOR_BYTES 1536 /* a descriptor with what fits beside it */
#define SLOTS 4         /* steps of a call that may be under way at once, see collectives.c */
#define SLOT_BYTES (256 * 1024)
#define ENTRIES 256             /* messages of a channel that may be announced and not yet read */
#define RING_BYTES (256 * 1024) /* of a large message that may be under way */

#define FIFO_BYTES (256 * 1024) /* of a schedule's data between two ranks that may be under way */
#define RECORDS 1024            /* calls of a rank that are remembered */
#define DECISIONS 64           /* that are remembered, see un_group_decide */
#define SITES 128               /* lines of its program whose text is kept at once */

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
 * for which it is atomic too. A rank uses its two descriptors alternately: when it runs one call
 * ahead, it leaves alone what slower peers still read. Small contributions are in the payload. */
typedef struct descriptor {
    flag_t call;
    flag_t signature;
    flag_t bytes;
    flag_t hash;
    char payload[DESCRIPTOR_BYTES - 32];
} descriptor;

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
typedef struct fifo {
    _Alignas(LINE_BYTES) flag_t written; /* the sender's line: bytes so far, over all calls */
    _Alignas(LINE_BYTES) flag_t read;    /* the receiver's */
    _Alignas(LINE_BYTES) char ring[FIFO_BYTES];
} fifo;

/* What a call or a message leaves behind; see records.c. The first word is written last. */
typedef struct record {
    flag_t number;
    flag_t call;      /* its number; of a message, its tag */
    flag_t signature; /* as in a descriptor; a message's root is its peer */
    flag_t bytes;     /* that this rank gives, or takes where it gives nothing */
    flag_t arrived, started, ended; /* in ticks */
    _Atomic uint32_t state; /* below; of a failure, the status above; then the thread */
    _Atomic uint32_t site; /* its number, and above it the step in which the call was made */
} record;

enum record_state { QUEUED = 1, ARRIVED, MOVING_DATA, FINISHED, FAILED };
enum { THREAD_SHIFT = 24 }; /* of the state: above it is the number of the thread */
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
    _Alignas(LINE_BYTES) flag_t progress; /* steps finished, over all calls */
    _Alignas(LINE_BYTES) _Atomic uint32_t sleepers;
    _Alignas(LINE_BYTES) _Atomic uint32_t closed;
    _Atomic uint32_t core; /* where we last fell asleep, and 1; 0: nowhere yet */
    flag_t works;          /* how many we have submitted */
    _Atomic uint32_t is_here; /* of a group over hosts: we have opened it */
    flag_t ending;            /* of a rank elsewhere: how it ended, as in a un_failure; 1: unknown */
    _Alignas(LINE_BYTES) _Atomic uint32_t doorbell; /* rung when a message of ours may go on */
    _Atomic uint32_t listeners;
    _Alignas(LINE_BYTES) flag_t waiting; /* what we wait for, see deadlock.c */
    flag_t waiting_tag;
    flag_t unmatched; /* messages of that peer which are here and have another tag, */
    flag_t unmatched_tag; /* and the tag of the oldest */
    flag_t writing; /* the call in which we write into our peers' memory, see direct.c, */
    flag_t unread;  /* and the one in which the kernel would not let us read it */
    flag_t proof;   /* where our process has a word by which readers know it, see reading.c */
    _Alignas(LINE_BYTES) flag_t asked; /* a peer wants to know where we are: in which call of its */
    _Alignas(LINE_BYTES) note notes[UN_NOTES];
    _Alignas(LINE_BYTES) descriptor descriptors[2];
    _Alignas(LINE_BYTES) identity identity;
    _Alignas(LINE_BYTES) record records[RECORDS];
    _Alignas(LINE_BYTES) site_text sites[SITES];
    uint64_t sizes[]; /* two tables: bytes to, then bytes from each rank; then open channels; then, of a
                       * group over hosts, messages sent to and had from each rank when we began to wait */
} control;

typedef struct header {
    uint64_t magic;
    uint32_t version;
    uint32_t ranks;
    uint64_t nonce;
    uint32_t cores;
    _Alignas(LINE_BYTES) flag_t abort; /* 0, or status, rank and call of the first fault */
    _Alignas(LINE_BYTES) flag_t decisions[UN_BOOKS][DECISIONS]; /* each a serial, and the
                                                               * value of the first */
    _Alignas(LINE_BYTES) flag_t unreadable; /* ranks cannot, or must not, read each other's memory */
} header;

#endif
