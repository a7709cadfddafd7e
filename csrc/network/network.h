/* The network: this process's one UCX worker, its links to processes on other hosts, and how it is
 * driven. It moves bytes between addresses and knows no groups; who opens it says what becomes of
 * arrivals. It uses portable UCP only, so that it runs over TCP as well as RDMA.
 */
#ifndef UNISONO_NETWORK_H
#define UNISONO_NETWORK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { EAGER_MOST = 64 * 1024 }; /* bytes that are sent eagerly */

typedef struct un_link un_link; /* to a process of another host */

typedef struct wire { /* the header of everything that is sent */
    uint64_t group;
    uint16_t kind; /* the rest is its user's */
    uint16_t from;
    uint32_t extra;
    uint64_t number;
    uint64_t words[3];
    uint64_t proof; /* of the process that sends it, to the one that receives it */
} wire;

/* A caller's buffer that is being sent or filled. */
enum { UNDER_WAY_YET, HAS_LANDED, IS_BROKEN };
typedef struct transfer {
    _Atomic uint32_t state;
    un_link *link; /* may be NULL */
    wire head;     /* of the data sent */
} transfer;

/* Data that stays with its sender until it is fetched or dropped. */
typedef struct remote_data remote_data;

typedef struct network_user {
    /* Something has arrived. `data`, if not NULL, holds its bytes until return; otherwise they are
     * at the sender. True: the user has kept `remote`. Called with the network's lock. */
    bool (*deliver)(const wire *head, const void *data, size_t bytes, remote_data *remote);
    void (*look)(void); /* periodically, in the network's thread */
    void (*drop)(void); /* the network closes: free what holds its memory; with its lock */
} network_user;

/* Open it, unless it is; returns what went wrong, or NULL. Its own address is `address`. */
const char *open_network(const char *const *settings, const network_user *user,
                         const void **address, size_t *bytes);
void close_network(void);

/* Destroy UCX's worker: nothing that is under way touches its memory any more, and all links are
 * broken, until the network has been closed and is opened again. */
void give_up_network(void);
bool network_is_open(void); /* and has not been given up */

/* Links by the address of the worker at their other end; all that is sent carries the `proof` for
 * it. NULL: UCX cannot reach it. */
un_link *link_to(const void *address, size_t bytes, uint64_t proof);
bool link_is_broken(const un_link *link, int64_t for_ns); /* for so long at least */
void break_link(un_link *link);                           /* its operations in flight fail */

/* Send a copy, and forget about it. */
void send_copy_of(un_link *link, const wire *head, const void *data, size_t bytes);

/* Send from, or fetch to, the caller's memory, which is in use until the transfer has landed or
 * is broken. */
void send_from(un_link *link, const wire *head, const void *data, size_t bytes, transfer *t);
void fetch_to(remote_data *remote, void *to, size_t bytes, transfer *t);
void drop_remote(remote_data *remote);

/* Waiting threads drive UCX: while one attends to it, no other thread needs to. */
void attend_network(bool begins);

/* Without waiting; returns whether anything happened. poll_network looks once, for a thread that
 * waits for a message: it goes on as soon as that has arrived. */
bool drive_network(void);
bool poll_network(void);
uint32_t network_rounds(void); /* changes after each round in which something happened */
void await_network(uint32_t seen, int64_t ns); /* until it is no longer `seen` */

void lock_network(void);
void unlock_network(void);

#endif
