/* A rank's messages: the engine's files, without records, deadlocks and other hosts. */
#include "model.h"

#include "base/system.c"
#include "base/wait.c"
#include "local/channels.c"
#include "local/matching.c"
#include "local/messages.c"
#include "local/receive.c"
#include "local/send.c"
#include "streams.h"

un_status status_from_abort(const un_group *g) { return UN_OK; }
void abort_group(un_group *g, un_status status, int rank, uint64_t call) { assert(false); }
bool group_is_inherited(const un_group *g) { return false; }
void record_start(un_group *g, uint64_t number) {}
void record_end(un_group *g, uint64_t number, un_status status) {}
uint64_t signature_of(un_operation operation, un_reduction reduction, int root, un_dtype dtype) { return 0; }
uint64_t open_record(un_group *g, uint64_t signature, uint64_t bytes, uint64_t call, const un_site *site,
                     enum record_state state) {
    return 0;
}

/* The kernel gives zeros: whoever looks into a channel before it has memory races with this. */
un_status prepare_channel(un_group *g, int to) {
    channel *c = channel_of(g, g->rank, to);
    *(volatile uint64_t *)&c->entries[0].number = 0;
    return UN_OK;
}

static struct traffic traffics[RANKS][RANKS];
static struct handle handles[RANKS][RANKS];

static void open_messages(int64_t eager_bytes) {
    open_ranks();
    for (int rank = 0; rank < RANKS; rank++) {
        ranks[rank].messages.traffic = traffics[rank];
        ranks[rank].messages.eager_bytes = eager_bytes;
        for (int peer = 0; peer < RANKS; peer++) { /* one message at a time has a handle */
            traffics[rank][peer].handles = &handles[rank][peer];
            traffics[rank][peer].handle_count = traffics[rank][peer].free_handle = 1;
        }
    }
}

/* Of each rank's messages to, or from, the other one. */
enum { MOST_MESSAGES = 5, MOST_BYTES = 6 };
static char data[RANKS][MOST_MESSAGES][MOST_BYTES];
static un_view views[RANKS][MOST_MESSAGES];
static un_message messages[RANKS][MOST_MESSAGES];

/* Rank 0 is to send, and rank 1 to receive, so many messages of so many bytes: 1, 2, ... */
static void prepare_messages(int count, size_t bytes) {
    for (int rank = 0; rank < RANKS; rank++)
        for (int i = 0; i < count; i++) {
            un_message *m = &messages[rank][i];
            for (size_t byte = 0; byte < bytes && !rank; byte++) data[rank][i][byte] = (char)(i + byte + 1);
            views[rank][i].data = data[rank][i];
            m->stream.views = &views[rank][i];
            m->stream.bytes = bytes;
            m->sends = !rank;
            m->peer = m->source = 1 - rank;
            m->tag = i;
        }
}

/* Start them all. */
static void start_messages(int count, size_t bytes) {
    open_messages((int64_t)bytes);
    prepare_messages(count, bytes);
    for (int i = 0; i < count; i++) {
        start_sending(&ranks[0], &messages[0][i]);
        start_receiving(&ranks[1], &messages[1][i]);
    }
}

/* Both sides of one that goes through the ring have agreed on it already. */
static void start_moving(size_t bytes) {
    open_messages(-1);
    prepare_messages(1, bytes);
    messages[0][0].phase = messages[1][0].phase = MOVING;
    traffics[0][1].passed = &messages[0][0];
    enqueue(&traffics[1][0].receives, &messages[1][0]);
}

static void check_messages(int count, size_t bytes) {
    for (int i = 0; i < count; i++)
        for (size_t byte = 0; byte < bytes; byte++) assert(data[1][i][byte] == (char)(i + byte + 1));
}
