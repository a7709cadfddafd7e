/* The network: one UCX worker per process.
 *
 * One lock guards all of UCX. Threads that wait for something from another host drive the worker
 * themselves: they poll for a while and then one of them, the leader, sleeps on the worker's event
 * descriptor, and the others on the number of rounds. So a message wakes the thread that waits for
 * it, and no other. For programs that compute while their peers send to them, or that sleep on
 * memory of their own host, there is one more thread: it sleeps on the descriptor too, but while
 * others wait it only polls every NAP_NS.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/system.h"
#include "network/network.h"
#include "network/ucx.h"
#include "unisono.h"

enum {
    MESSAGE_ID = 0,
    ROUNDS_AT_ONCE = 16,
    NAP_NS = 20 * 1000 * 1000,
    PAUSE_NS = 1000 * 1000, /* between two calls */
    IDLE_NS = 100 * 1000 * 1000,
    CLOSING_NS = 1000 * 1000 * 1000, /* for operations in flight when the network closes */
};

struct un_link {
    ucp_ep_h endpoint; /* NULL: broken, by us */
    int64_t broken_ns; /* since when; 0: not broken */
    uint64_t proof;
    size_t address_bytes;
    un_link *next;
    char address[];
};

struct remote_data {
    void *description; /* UCX's */
    un_link *link;
};

static struct {
    pthread_mutex_t lock; /* recursive: an arrival may be answered at once */
    network_user user;
    ucp_context_h context;
    ucp_worker_h worker; /* NULL: closed, or given up */
    ucp_address_t *address;
    size_t address_bytes;
    int events; /* a descriptor that is readable when there is something to do */
    un_link *links;
    uint32_t unsent; /* copies that UCX still holds */
    _Atomic uint32_t rounds, followers;
    _Atomic uint32_t attendants; /* threads that wait, and drive the worker meanwhile */
    _Atomic uint32_t visits;     /* how many there have been */
    _Atomic bool is_led, leader_sleeps;
    _Atomic uint32_t stops;
    pthread_t thread;
    bool has_thread;
} net;

static _Thread_local bool leads;

/* -- opening and closing ------------------------------------------------------------------------ */

static void init_lock(void) {
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&net.lock, &recursive);
    pthread_mutexattr_destroy(&recursive);
}

static pthread_once_t lock_once = PTHREAD_ONCE_INIT;

void lock_network(void) {
    pthread_once(&lock_once, init_lock);
    pthread_mutex_lock(&net.lock);
}

void unlock_network(void) { pthread_mutex_unlock(&net.lock); }

/* In a forked child: the worker is the parent's, and so are its sockets. */
static void forget_network(void) {
    memset(&net, 0, sizeof net);
    leads = false;
    init_lock();
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_network); }

static ucs_status_t on_message(void *unused, const void *header, size_t header_bytes, void *data,
                               size_t bytes, const ucp_am_recv_param_t *param) {
    (void)unused;
    wire head;
    if (header_bytes != sizeof head) return UCS_OK; /* a stranger's */
    memcpy(&head, header, sizeof head);
    if (!(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        net.user.deliver(&head, data, bytes, NULL);
        return UCS_OK;
    }
    remote_data *remote = malloc(sizeof *remote);
    if (!remote) return UCS_OK; /* completes it for the sender; its receiver times out */
    *remote = (remote_data){.description = data};
    if (net.user.deliver(&head, NULL, bytes, remote)) return UCS_INPROGRESS;
    free(remote);
    return UCS_OK;
}

static void *run_network(void *unused);

static ucs_status_t make_context(const char *const *settings) {
    ucp_config_t *config;
    ucs_status_t status = ucx.config_read(NULL, NULL, &config);
    if (status) return status;
    for (; settings[0]; settings += 2) ucx.config_modify(config, settings[0], settings[1]);
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                           .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    status = ucx.init_version(UCX_API_MAJOR, UCX_API_MINOR, &params, config, &net.context);
    ucx.config_release(config);
    return status;
}

static ucs_status_t make_worker(void) {
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucs_status_t status = ucx.worker_create(net.context, &params, &net.worker);
    if (status) return status;
    ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB,
        .id = MESSAGE_ID,
        .cb = on_message};
    status = ucx.worker_set_am_recv_handler(net.worker, &handler);
    if (!status) status = ucx.worker_get_efd(net.worker, &net.events);
    if (!status) status = ucx.worker_get_address(net.worker, &net.address, &net.address_bytes);
    return status;
}

static void free_worker(void) {
    if (net.address) ucx.worker_release_address(net.worker, net.address);
    if (net.worker) ucx.worker_destroy(net.worker);
    if (net.context) ucx.cleanup(net.context);
    net.address = NULL;
    net.worker = NULL;
    net.context = NULL;
}

const char *un_ucx_load(const char *path, unsigned version[3]) {
    const char *problem = load_ucx(path);
    if (!problem) ucx.get_version(&version[0], &version[1], &version[2]);
    return problem;
}

const char *open_network(const char *const *settings, const network_user *user,
                         const void **address, size_t *bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    const char *problem = NULL;
    lock_network();
    if (net.has_thread && !net.worker) {
        problem = "it had to be given up, because it did not end a transfer on a broken link";
    } else if (!net.worker) {
        net.user = *user;
        ucs_status_t status = make_context(settings);
        if (!status) status = make_worker();
        atomic_store(&net.stops, 0);
        if (status)
            problem = ucx.status_string(status);
        else if (!start_thread(&net.thread, "unisono:network", run_network, NULL))
            problem = "no thread could be started";
        net.has_thread = !problem;
        if (problem) free_worker();
    }
    *address = net.address;
    *bytes = net.address_bytes;
    unlock_network();
    return problem;
}

static bool drive(int rounds) {
    bool any = false;
    for (int i = 0; i < rounds && net.worker && ucx.worker_progress(net.worker); i++) any = true;
    return any;
}

/* Without notice to the peer: groups have already said goodbye on it. */
static void close_link(un_link *link) {
    if (!link->endpoint) return;
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_EP_CLOSE_FLAG_FORCE};
    void *request = ucx.ep_close_nbx(link->endpoint, &param);
    link->endpoint = NULL;
    if (!UCS_PTR_IS_PTR(request)) return;
    for (int64_t end = clock_ns() + CLOSING_NS;
         ucx.request_check_status(request) == UCS_INPROGRESS && clock_ns() < end;)
        drive(ROUNDS_AT_ONCE);
    ucx.request_free(request);
}

void close_network(void) {
    lock_network();
    bool is_open = net.has_thread;
    unlock_network();
    if (!is_open) return;
    atomic_store(&net.stops, 1);
    wake(&net.stops, OF_PROCESS, 1);
    lock_network();
    if (net.worker) ucx.worker_signal(net.worker);
    for (int64_t end = clock_ns() + CLOSING_NS; net.unsent && clock_ns() < end;)
        drive(ROUNDS_AT_ONCE);
    unlock_network();
    pthread_join(net.thread, NULL);
    lock_network();
    net.user.drop();
    while (net.links) {
        un_link *link = net.links;
        close_link(link);
        net.links = link->next;
        free(link);
    }
    free_worker();
    net.has_thread = false;
    unlock_network();
}

void give_up_network(void) {
    lock_network();
    for (un_link *link = net.links; link; link = link->next) {
        link->endpoint = NULL;
        if (!link->broken_ns) link->broken_ns = clock_ns();
    }
    net.unsent = 0;
    free_worker();
    unlock_network();
}

bool network_is_open(void) {
    lock_network();
    bool is_open = net.worker != NULL;
    unlock_network();
    return is_open;
}

/* -- links ---------------------------------------------------------------------------------------- */

static void on_error(void *argument, ucp_ep_h endpoint, ucs_status_t status) {
    (void)endpoint, (void)status;
    un_link *link = argument;
    if (!link->broken_ns) link->broken_ns = clock_ns();
}

un_link *link_to(const void *address, size_t bytes, uint64_t proof) {
    for (un_link *link = net.links; link; link = link->next)
        if (link->address_bytes == bytes && !memcmp(link->address, address, bytes)) return link;
    un_link *link = net.worker ? calloc(1, sizeof *link + bytes) : NULL;
    if (!link) return NULL;
    link->proof = proof;
    link->address_bytes = bytes;
    memcpy(link->address, address, bytes);
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLER,
                              .address = (const ucp_address_t *)(const void *)link->address,
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {.cb = on_error, .arg = link}};
    if (ucx.ep_create(net.worker, &params, &link->endpoint)) {
        free(link);
        return NULL;
    }
    link->next = net.links;
    net.links = link;
    return link;
}

bool link_is_broken(const un_link *link, int64_t for_ns) {
    return link && link->broken_ns && clock_ns() - link->broken_ns >= for_ns;
}

void break_link(un_link *link) {
    lock_network();
    if (link && !link->broken_ns) link->broken_ns = clock_ns();
    if (link) close_link(link);
    unlock_network();
}

/* -- sending and fetching --------------------------------------------------------------------------- */

static void end_transfer(transfer *t, ucs_status_t status) {
    atomic_store_explicit(&t->state, status ? IS_BROKEN : HAS_LANDED, memory_order_release);
}

static void on_sent(void *request, ucs_status_t status, void *argument) {
    ucx.request_free(request);
    end_transfer(argument, status);
}

static void on_fetched(void *request, ucs_status_t status, size_t bytes, void *argument) {
    (void)bytes;
    on_sent(request, status, argument);
}

typedef struct sent_copy {
    wire head;
    char data[];
} sent_copy;

static void on_copy_sent(void *request, ucs_status_t status, void *argument) {
    (void)status;
    ucx.request_free(request);
    free(argument);
    net.unsent--;
}

static void *post_message(un_link *link, const wire *head, const void *data, size_t bytes,
                          ucp_send_nbx_callback_t then, void *argument) {
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_FLAGS,
        .flags = bytes > EAGER_MOST ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER,
        .cb.send = then,
        .user_data = argument};
    return ucx.am_send_nbx(link->endpoint, MESSAGE_ID, head, sizeof *head, data, bytes, &param);
}

void send_copy_of(un_link *link, const wire *head, const void *data, size_t bytes) {
    sent_copy *sent = malloc(sizeof *sent + bytes);
    if (!sent) return;
    sent->head = *head;
    if (bytes) memcpy(sent->data, data, bytes);
    lock_network();
    void *request = NULL;
    if (link) sent->head.proof = link->proof;
    if (link && link->endpoint && !link->broken_ns)
        request = post_message(link, &sent->head, sent->data, bytes, on_copy_sent, sent);
    if (UCS_PTR_IS_PTR(request))
        net.unsent++;
    else
        free(sent);
    unlock_network();
}

void send_from(un_link *link, const wire *head, const void *data, size_t bytes, transfer *t) {
    atomic_store(&t->state, UNDER_WAY_YET);
    t->link = link;
    t->head = *head;
    if (link) t->head.proof = link->proof;
    lock_network();
    void *request = (void *)(intptr_t)UCS_ERR_CANCELED;
    if (link && link->endpoint && !link->broken_ns)
        request = post_message(link, &t->head, data, bytes, on_sent, t);
    if (!UCS_PTR_IS_PTR(request)) end_transfer(t, UCS_PTR_STATUS(request));
    unlock_network();
}

void fetch_to(remote_data *remote, void *to, size_t bytes, transfer *t) {
    atomic_store(&t->state, UNDER_WAY_YET);
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                 UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
                                 .cb.recv_am = on_fetched,
                                 .user_data = t};
    lock_network();
    void *request = (void *)(intptr_t)UCS_ERR_CANCELED;
    if (net.worker)
        request = ucx.am_recv_data_nbx(net.worker, remote->description, to, bytes, &param);
    if (!UCS_PTR_IS_PTR(request)) end_transfer(t, UCS_PTR_STATUS(request));
    unlock_network();
    free(remote);
}

void drop_remote(remote_data *remote) {
    if (!remote) return;
    lock_network();
    if (net.worker) ucx.am_data_release(net.worker, remote->description);
    unlock_network();
    free(remote);
}

/* -- driving -------------------------------------------------------------------------------------- */

/* Something has arrived, perhaps for another thread: wake those that sleep. */
static void tell_rounds(void) {
    atomic_fetch_add(&net.rounds, 1);
    if (atomic_load(&net.followers)) wake(&net.rounds, OF_PROCESS, INT_MAX);
    if (!leads && atomic_load(&net.leader_sleeps)) ucx.worker_signal(net.worker);
}

static bool try_to_drive(int rounds) {
    pthread_once(&lock_once, init_lock);
    if (pthread_mutex_trylock(&net.lock)) return false;
    bool any = drive(rounds);
    if (any) tell_rounds();
    pthread_mutex_unlock(&net.lock);
    return any;
}

bool drive_network(void) { return try_to_drive(ROUNDS_AT_ONCE); }
bool poll_network(void) { return try_to_drive(1); }

void attend_network(bool begins) {
    atomic_fetch_add(&net.attendants, begins ? 1 : -1);
    if (begins) atomic_fetch_add_explicit(&net.visits, 1, memory_order_relaxed);
}

uint32_t network_rounds(void) { return atomic_load(&net.rounds); }

/* Sleep until UCX has something to do. */
static void sleep_on_events(int64_t ns, _Atomic bool *sleeps) {
    lock_network();
    if (sleeps) atomic_store(sleeps, true);
    bool any = drive(ROUNDS_AT_ONCE);
    if (any) tell_rounds();
    bool idle = !any && (!net.worker || ucx.worker_arm(net.worker) == UCS_OK);
    int events = net.worker ? net.events : -1;
    unlock_network();
    struct timespec most = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    struct pollfd polled = {.fd = events, .events = POLLIN};
    if (idle) ppoll(&polled, 1, &most, NULL);
    if (sleeps) atomic_store(sleeps, false);
}

static void lead(uint32_t seen, int64_t ns) {
    leads = true;
    if (atomic_load(&net.rounds) == seen)
        sleep_on_events(ns < NAP_NS ? ns : NAP_NS, &net.leader_sleeps);
    drive_network();
    leads = false;
    atomic_store(&net.is_led, false);
    if (atomic_load(&net.followers)) wake(&net.rounds, OF_PROCESS, INT_MAX); /* one takes over */
}

void await_network(uint32_t seen, int64_t ns) {
    attend_network(true);
    if (!atomic_exchange(&net.is_led, true)) {
        lead(seen, ns);
    } else {
        atomic_fetch_add(&net.followers, 1);
        if (atomic_load(&net.is_led) && atomic_load(&net.rounds) == seen)
            sleep_on(&net.rounds, OF_PROCESS, seen, ns < NAP_NS ? ns : NAP_NS);
        atomic_fetch_sub(&net.followers, 1);
    }
    attend_network(false);
}

static void *run_network(void *unused) {
    (void)unused;
    uint32_t seen = 0;
    while (!atomic_load(&net.stops)) {
        uint32_t visits = atomic_load(&net.visits);
        if (atomic_load(&net.attendants))
            sleep_on(&net.stops, OF_PROCESS, 0, NAP_NS);
        else if (visits != seen) /* the next call is near: wake no thread for its messages */
            sleep_on(&net.stops, OF_PROCESS, 0, PAUSE_NS);
        else
            sleep_on_events(IDLE_NS, NULL);
        seen = visits;
        drive_network();
        net.user.look();
    }
    return NULL;
}
