/* The segment's layout: what each rank writes, where, and which ranks read it. */
#ifndef UNISONO_LAYOUT_H
#define UNISONO_LAYOUT_H

#include <stdatomic.h>

#include "unisono.h"

#define LINE_BYTES 64
#define PAGE_BYTES 4096
#define DESCRIPTOR_BYTES (4096 + LINE_BYTES) /* a descriptor with its payload */
#define SLOTS 4 /* steps of a call that may be in flight, see collectives.c */
#define SLOT_BYTES (256 * 1024)
#define ENTRIES 256             /* messages of a channel announced and not yet read */
#define RING_BYTES (256 * 1024) /* of a large message in flight */

#define FIFO_BYTES (256 * 1024) /* of a schedule's data in flight between two ranks */
#define RECORDS 1024            /* calls of a rank that are kept */
#define DECISIONS 64            /* that are kept, see un_group_decide */
#define SITES 128               /* lines of its program whose text is kept at once */

typedef _Atomic uint64_t flag_t;

/* Relaxed: for words ordered by another word, or that are only hints. */
static inline uint64_t read_word(const flag_t *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

static inline void write_word(flag_t *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_relaxed);
}

/* What a rank is about to do. `call` is written last (release) and read first (acquire): a
 * reader that sees the number sees the rest. Error texts also read descriptors of other calls,
 * so the rest is atomic too. A rank uses its two descriptors alternately: when it is one call
 * ahead, slower peers can still read the other. Small contributions are in the payload: those of
 * DESCRIBED_MOST bytes, over few hosts of DESCRIBED_OVER_HOSTS. */
typedef struct descriptor {
    flag_t call;
    flag_t signature;
    flag_t bytes;
    flag_t hash;
    char payload[DESCRIPTOR_BYTES - 32];
} descriptor;

/* A message that its sender announces; see channels.c. `number` is written last: which message
 * of the channel this is. */
typedef struct entry {
    _Alignas(LINE_BYTES) flag_t number;
    flag_t handle; /* by which the sender finds the message on a reply; 0: no reply */
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
    _Alignas(LINE_BYTES) flag_t written;         /* the sender's line: bytes written to the ring, */
    flag_t heard;                                /* replies read */
    _Alignas(LINE_BYTES) flag_t read;            /* the receiver's: bytes read from the ring, */
    flag_t taken;                                /* entries read */
    _Alignas(LINE_BYTES) reply replies[ENTRIES]; /* the receiver's */
    _Alignas(PAGE_BYTES) entry entries[ENTRIES]; /* the sender's, and the ring */
    char ring[RING_BYTES];
} channel;

/* Bytes from one rank to another, in the order in which they were written; see schedules.c. */
typedef struct fifo {
    _Alignas(LINE_BYTES) flag_t written; /* the sender's line: bytes so far, over all calls */
    _Alignas(LINE_BYTES) flag_t read;    /* the receiver's */
    _Alignas(LINE_BYTES) char ring[FIFO_BYTES];
} fifo;

/* The record of a call or a message; see records.c. The first word is written last. */
typedef struct record {
    flag_t number;
    flag_t call;                    /* its number; of a message, its tag */
    flag_t signature;               /* as in a descriptor; a message's root is its peer */
    flag_t bytes;                   /* that this rank sends, or receives if it sends nothing */
    flag_t arrived, started, ended; /* in ticks */
    _Atomic uint32_t state;         /* below; of a failure, the status above; then the thread */
    _Atomic uint32_t site;          /* its number, and above it the step of the program */
} record;

enum record_state { QUEUED = 1, ARRIVED, MOVING_DATA, FINISHED, FAILED };
enum { THREAD_SHIFT = 24 }; /* of the state: above it is the number of the thread */
enum { SITE_BITS = 12 };    /* of its number; sites so far apart have different texts */

typedef struct site_text { /* of the site with this number; a later one may replace it */
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

/* One rank's control block; each line has one writer, except `sleepers` and the doorbell. */
typedef struct control {
    _Alignas(LINE_BYTES) flag_t progress; /* steps finished, over all calls */
    _Alignas(LINE_BYTES) _Atomic uint32_t sleepers;
    _Alignas(LINE_BYTES) _Atomic uint32_t closed;
    _Atomic uint32_t core;    /* where we last fell asleep, plus 1; 0: not yet */
    flag_t works;             /* how many we have submitted */
    _Atomic uint32_t is_here; /* of a group over hosts: we have opened it */
    flag_t ending;            /* of a remote rank: how it ended, as in un_failure; 1: unknown */
    _Alignas(LINE_BYTES) _Atomic uint32_t doorbell; /* rung when a message of ours may proceed */
    _Atomic uint32_t listeners;
    _Alignas(LINE_BYTES) flag_t waiting; /* what we wait for, see deadlock.c */
    flag_t waiting_tag;
    flag_t unmatched;     /* messages of that peer with another tag that have arrived, */
    flag_t unmatched_tag; /* and the tag of the oldest */
    flag_t writing;       /* the call in which we write into our peers' memory, see direct.c, */
    flag_t unread;        /* and the one in which the kernel did not let us read it */
    flag_t proof; /* address of a word that identifies our process to readers, see reading.c */
    _Alignas(LINE_BYTES) flag_t asked; /* a peer asks where we are: in which call of its */
    _Alignas(LINE_BYTES) note notes[UN_NOTES];
    _Alignas(LINE_BYTES) descriptor descriptors[2];
    _Alignas(LINE_BYTES) identity identity;
    _Alignas(LINE_BYTES) record records[RECORDS];
    _Alignas(LINE_BYTES) site_text sites[SITES];
    /* Two tables: bytes to, then bytes from each rank; then open channels; then, of a group over
     * hosts, messages sent to and received from each rank. */
    uint64_t sizes[];
} control;

typedef struct header {
    uint64_t magic;
    uint32_t version;
    uint32_t ranks;
    uint64_t nonce;
    uint32_t cores;
    _Alignas(LINE_BYTES) flag_t abort; /* 0, or status, rank and call of the first fault */
    _Alignas(LINE_BYTES) flag_t decisions[UN_BOOKS][DECISIONS]; /* serial and first value */
    _Alignas(LINE_BYTES) flag_t unreadable; /* ranks cannot or must not read each other's memory */
} header;

#endif
