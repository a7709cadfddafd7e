/* The network: this process's one UCX worker, its links to processes of other hosts, and who drives it.
 *
 * Nothing here knows of groups' contents: what arrives goes to `deliver_wire` of hosts.c. All of it is portable
 * UCP, so that it runs over TCP as over RDMA.
 */
#ifndef UNISONO_NETWORK_H
#define UNISONO_NETWORK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { EAGER_MOST = 64 * 1024 }; /* bytes that are sent without asking the receiver first */

typedef struct un_link un_link; /* to a process of another host */

typedef struct wire { /* what precedes everything that is sent */
    uint64_t group;   /* the key of the group that it belongs to */
    uint16_t kind;    /* of hosts.h */
    uint16_t from;    /* the sender's rank in that group */
    uint32_t extra;
    uint64_t number;
    uint64_t words[3];
} wire;

/* A buffer of the caller's that is being sent, or filled. */
enum { UNDER_WAY_YET, HAS_LANDED, IS_BROKEN };
typedef struct transfer {
    _Atomic uint32_t state;
    un_link *link; /* may be NULL */
    wire head;     /* of what is sent */
} transfer;

/* Data that is still at its sender, until it is fetched or dropped. */
typedef struct remote_data remote_data;

/* hosts.c: something has arrived. With `data` its bytes are there, and gone on return; otherwise they
 * are at the sender. True: whoever it is for has kept `remote`. Called with the network's lock. */
bool deliver_wire(const wire *head, const void *data, size_t bytes, remote_data *remote);

/* Links by the address of the worker at their other end. NULL: UCX cannot reach it. */
un_link *link_to(const void *address, size_t bytes);
bool link_is_broken(const un_link *link, int64_t for_ns); /* for so long at least */
void cut_link(un_link *link); /* what is under way on it breaks off */

/* Send a copy, and forget about it. */
void send_copy_of(un_link *link, const wire *head, const void *data, size_t bytes);

/* Send from where it lies; fetch to where it shall lie. The memory is in use until the transfer has
 * landed or is broken. */
void send_from(un_link *link, const wire *head, const void *data, size_t bytes, transfer *t);
void fetch_to(remote_data *remote, void *to, size_t bytes, transfer *t);
void drop_remote(remote_data *remote);

/* UCX is driven by whoever waits; between these two nobody else needs to. */
void begin_attending(void);
void end_attending(void);

/* A round, without waiting; whether anything has happened. */
bool drive_network(void);
uint32_t network_rounds(void); /* another number after each that brought something */
void await_network(uint32_t seen, int64_t ns); /* until rounds are no longer `seen`, for so long at most */

void lock_network(void);
void unlock_network(void);
void forget_network_after_fork(void);

#endif
