/* What the files about messages share. */
#ifndef UNISONO_MESSAGES_H
#define UNISONO_MESSAGES_H

#include "local/worker.h"

enum phase {
    TO_ANNOUNCE, /* a send for which the channel has no room yet */
    ANNOUNCED,
    WANTED,   /* a receive without a message */
    TO_REPLY, /* it has one, in match.next, but no room to reply */
    TO_GRANT, /* it has a large one, which waits for the ring */
    MOVING,   /* a large message goes through the ring */
};

/* A message that arrived before its receive: the contents of its entry. */
typedef struct arrival {
    un_match match;
    uint64_t handle;
    uint64_t bytes;
    un_dtype dtype;
    struct parcel *parcel; /* from another host: what it arrived in */
    char payload[];
} arrival;

typedef struct message_queue {
    un_message *first, *last;
} message_queue;

/* Messages exchanged with one rank. This is private memory: what a peer may have overwritten is
 * checked against it. */
struct traffic {
    /* our channel to it */
    bool channel_ready;  /* has memory */
    uint64_t announced;  /* entries used, */
    uint64_t taken;      /* and read by it, as far as we know */
    uint64_t heard;      /* replies read */
    uint64_t written;    /* bytes of large messages before the one in the ring */
    message_queue sends; /* to be announced */
    un_message *passed;  /* the one in the ring */
    struct handle {
        un_message *message; /* NULL: the handle is free */
        uint32_t next_free;
    } *handles; /* of announced messages that await a reply; from 1 on */
    uint32_t handle_count, free_handle;
    uint32_t unanswered; /* handles in use */

    /* its channel to us */
    bool open;
    uint64_t entries_read;  /* that we read */
    uint64_t replied;       /* replies that we wrote, */
    uint64_t replies_heard; /* and it read as far as we know */
    message_queue due;      /* receives with a message, but no room to reply */
    uint64_t read;          /* bytes of large messages before the one in the ring */
    message_queue receives; /* that have a large message: the first one has the ring */
    uint32_t wanted;        /* receives that name it as their source */
    uint32_t unmatched;     /* messages that arrived before their receives */
};

/* matching.c */
void add_match(match_table *t, un_match *match);
un_match *find_match(const match_table *t, int source, int64_t tag); /* the oldest, or NULL */
un_match *take_match(match_table *t, int source, int64_t tag);       /* the same, taken out */
un_match *oldest_from(const match_table *t, int source);             /* with any tag */
void clear_matches(match_table *t, bool frees);

/* channels.c */
enum { PIECE_BYTES = RING_BYTES / 4 };
enum { PAYLOAD_BYTES = sizeof((entry *)0)->payload };
enum verdict { TAKEN, GRANTED }; /* of a reply, with the handle */

typedef struct awaited {
    const flag_t *word; /* NULL: there is none */
    uint64_t target;
} awaited;

bool progress(un_group *g); /* advance every message as far as possible; whether any moved */
awaited awaited_word(const un_group *g, const un_message *m);
void enqueue(message_queue *q, un_message *m);
void dequeue(message_queue *q);
void enter_phase(un_group *g, un_message *m, enum phase phase);
void complete(un_group *g, un_message *m, un_status status);
COLD void note_unfit(un_group *g, const un_message *m);
bool refuse_damage(un_group *g, int peer);
bool has_room(un_group *g, int peer, uint64_t used, uint64_t *freed, const flag_t *word);
void publish_freed(un_group *g, int peer, flag_t *word, uint64_t before, uint64_t now,
                   bool left_some);
void ring_bell(un_group *g, int rank);

/* A peer that polls its messages finds what we published by itself; the doorbell is for one that
 * sleeps. We publish and then check whether it listens; it publishes that it listens and then
 * polls its messages once more. All four are sequentially consistent, so that one of us sees the
 * other. */
static inline void publish_to_peer(flag_t *flag, uint64_t value) {
    atomic_store_explicit(flag, value, memory_order_seq_cst);
}

static inline uint64_t read_from_peer(const flag_t *flag) {
    return atomic_load_explicit(flag, memory_order_seq_cst);
}

/* Whether the slot for number `next` is written. Until then it has that of the previous round. */
static inline bool has_come(un_group *g, int peer, const flag_t *number, uint64_t next) {
    uint64_t seen = read_from_peer(number), before = next > ENTRIES ? next - ENTRIES : 0;
    if (seen != next && seen != before) refuse_damage(g, peer);
    return seen == next;
}

static inline size_t next_piece(const un_message *m) {
    size_t left = m->stream.bytes - m->moved;
    return left < PIECE_BYTES ? left : PIECE_BYTES;
}

/* send.c and receive.c: the steps of messages to and from one rank; whether any moved */
void start_sending(un_group *g, un_message *m);
bool announce_sends(un_group *g, int peer);
bool read_replies(un_group *g, int peer);
bool put_into_ring(un_group *g, int peer);
bool fits_entry(const un_message *m);
uint64_t take_handle(struct traffic *t, un_message *m);
un_message *give_handle_back(struct traffic *t, uint64_t handle);
bool is_eager(const un_group *g, const un_message *m);

void start_receiving(un_group *g, un_message *m);
bool take_entries(un_group *g, int source);
void take_arrived(un_group *g, const arrival *seen); /* from another host */
bool deliver_what_is_due(un_group *g, int source);
bool grant_next(un_group *g, int source);
bool take_from_ring(un_group *g, int source);

/* progress_thread.c */
bool look_for_progress(un_group *g); /* progress, with the lock */
void sleep_at_doorbell(un_group *g, int64_t ns);
bool start_progress_thread(un_group *g);
void wake_progress_thread(un_group *g);
void look_at_messages(un_group *g, unfinished *left);
void stop_progress_thread(un_group *g);

/* channels.c, for groups that open and close, and for deadlock.c */
bool make_traffic(un_group *g);
void free_traffic(un_group *g);
bool has_unread(const un_group *g, int from, int to, bool replies);

/* deadlock.c: with the message lock */
void note_waiting(un_group *g, const un_message *m, bool alone);
void forget_waiting(un_group *g);
void find_deadlock(un_group *g, const un_message *m);
un_waiting read_waiting(const un_group *g, int rank, uint64_t word); /* what is in a note */

#endif
