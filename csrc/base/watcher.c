/* Death detection: one thread per process that waits for its peers' processes to end.
 *
 * A peer is known by its pidfd, which it opened on itself and passed to us: that works across PID
 * namespaces, and a socket would not hang up if a child process had inherited it. A process that is
 * in many groups with us is watched once. When it ends, every group that it has not closed is
 * aborted with UN_PEER_LOST, and sleepers there wake up.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "base/records.h"
#include "base/wait.h"
#include "base/watcher.h"

typedef struct peer {
    uint64_t identity;
    int pidfd;
    int pid;        /* 0: not asked for yet; -1: none */
    unsigned users; /* memberships in groups */
    bool dead;
    int64_t ending; /* see un_failure.detail */
    struct peer *next;
} peer;

enum { GLANCE_MS = 400 }; /* how often we check whether a peer asks where we are */

static pthread_mutex_t lifecycle = PTHREAD_MUTEX_INITIALIZER; /* starting and ending the thread */

static struct {
    pthread_mutex_t lock;
    peer *peers;
    un_group *groups;
    bool running;
    bool answering;
    pthread_t thread;
    int bell; /* an eventfd: the set of peers has changed, or the thread should end */
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* How a process ended, from kernels that tell processes other than its parent (Linux 6.15): the
 * status as in wait(2), with ENDING_KNOWN. It is available once the parent has collected it. */
static int64_t ending_of(int pidfd) {
    struct {
        uint64_t mask, cgroup;
        uint32_t ids[11];
        int32_t exit_code;
    } info;
    const uint64_t wants_exit = 1 << 3;
    const unsigned long get_info = _IOWR(0xff, 11, info);
    for (int tries = 0; tries < 5; tries++) {
        memset(&info, 0, sizeof info);
        info.mask = wants_exit;
        if (ioctl(pidfd, get_info, &info)) return 0;
        if (info.mask & wants_exit) return UN_ENDING_KNOWN | (uint32_t)info.exit_code;
        sleep_ns(1000 * 1000);
    }
    return 0;
}

/* -- flags that a GPU waits for ------------------------------------------------------------------ */

typedef struct flag {
    _Alignas(LINE_BYTES) _Atomic uint32_t value;
    _Atomic bool is_released; /* the survivors share it; one of them raises it */
} flag;

static void release_flag(const un_group *g, int rank) {
    flag *f = g->watching.flags ? &g->watching.flags[rank] : NULL;
    if (f && !atomic_exchange(&f->is_released, true)) atomic_fetch_add(&f->value, UN_FLAG_RELEASED);
}

void un_group_set_flags(un_group *g, void *flags) {
    if (group_is_inherited(g)) return;
    pthread_mutex_lock(&watch.lock);
    g->watching.flags = flags;
    for (int rank = 0; rank < g->ranks; rank++) {
        const peer *p = g->watching.peers[rank];
        if (p && p->dead && !atomic_load(&control_of(g, rank)->closed)) release_flag(g, rank);
    }
    pthread_mutex_unlock(&watch.lock);
}

static void abort_groups_of(const peer *lost) {
    for (un_group *g = watch.groups; g; g = g->watching.next)
        for (int rank = 0; rank < g->ranks; rank++)
            if (g->watching.peers[rank] == lost && !atomic_load(&control_of(g, rank)->closed)) {
                if (lost->ending) write_word(&control_of(g, rank)->ending, (uint64_t)lost->ending);
                abort_group(g, UN_PEER_LOST, rank, 0);
                release_flag(g, rank);
            }
}

/* -- telling a peer where we are: the program may be busy, so a separate thread waits ---------- */

static void (*_Atomic locator)(char text[UN_TEXT_BYTES]);

void un_set_locator(void (*locate)(char text[UN_TEXT_BYTES])) { locator = locate; }

static void *answer(void *unused) {
    (void)unused;
    char text[UN_TEXT_BYTES] = "";
    void (*locate)(char text[UN_TEXT_BYTES]) = locator;
    if (locate) locate(text);
    pthread_mutex_lock(&watch.lock);
    for (un_group *g = watch.groups; g; g = g->watching.next)
        if (is_asked(g)) answer_where(g, text);
    watch.answering = false;
    pthread_mutex_unlock(&watch.lock);
    return NULL;
}

static void answer_if_asked(void) {
    bool asked = false;
    for (un_group *g = watch.groups; g; g = g->watching.next) asked |= is_asked(g);
    pthread_t thread;
    if (!asked || watch.answering || !locator) return;
    watch.answering = start_thread(&thread, "unisono:answers", answer, NULL);
    if (watch.answering) pthread_detach(thread);
}

static void wake_watcher(void) {
    uint64_t one = 1;
    if (write(watch.bell, &one, sizeof one) < 0) abort(); /* cannot happen: the counter is reset */
}

static void *watch_peers(void *unused) {
    (void)unused;
    struct pollfd *polled = NULL;
    peer **owners = NULL;
    pthread_mutex_lock(&watch.lock);
    while (watch.running) {
        size_t count = 1;
        for (peer *p = watch.peers; p; p = p->next) count += !p->dead;
        struct pollfd *more = realloc(polled, count * sizeof *polled);
        peer **more_owners = realloc(owners, count * sizeof *owners);
        if (more) polled = more;
        if (more_owners) owners = more_owners;
        if (!more || !more_owners) count = 1; /* no memory: deaths show as timeouts */
        if (!polled || !owners) break;
        polled[0] = (struct pollfd){.fd = watch.bell, .events = POLLIN};
        size_t next = 1;
        for (peer *p = watch.peers; p && next < count; p = p->next) {
            if (p->dead) continue;
            owners[next] = p;
            polled[next++] = (struct pollfd){.fd = p->pidfd, .events = POLLIN};
        }
        pthread_mutex_unlock(&watch.lock);
        poll(polled, count, locator ? GLANCE_MS : -1);
        pthread_mutex_lock(&watch.lock);
        answer_if_asked();
        if (polled[0].revents) { /* the set changed: what we polled may be gone */
            uint64_t rung;
            if (read(watch.bell, &rung, sizeof rung) < 0) continue;
        }
        for (size_t i = 1; i < count; i++) {
            if (!polled[i].revents) continue;
            for (peer *p = watch.peers; p; p = p->next)
                if (p == owners[i] && p->pidfd == polled[i].fd && !p->dead) {
                    p->dead = true;
                    p->ending = ending_of(p->pidfd);
                    abort_groups_of(p);
                }
        }
    }
    pthread_mutex_unlock(&watch.lock);
    free(polled);
    free(owners);
    return NULL;
}

/* In a forked child the thread is gone, its peers are the parent's, and a lock may be held. */
static void forget_peers(void) {
    pthread_mutex_init(&lifecycle, NULL);
    pthread_mutex_init(&watch.lock, NULL);
    watch.peers = NULL;
    watch.groups = NULL;
    watch.running = false;
    watch.answering = false;
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_peers); }

static bool start_watcher(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    if (watch.running) return true;
    watch.bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (watch.bell < 0) return false;
    watch.running = start_thread(&watch.thread, "unisono:watcher", watch_peers, NULL);
    if (!watch.running) close(watch.bell);
    return watch.running;
}

/* Both locks are held on entry and released. Without groups there is nothing to watch. */
static void unlock_and_end_idle_watcher(void) {
    bool idle = watch.running && !watch.groups;
    if (idle) watch.running = false;
    if (idle) wake_watcher();
    pthread_mutex_unlock(&watch.lock);
    if (idle) {
        pthread_join(watch.thread, NULL);
        close(watch.bell);
    }
    pthread_mutex_unlock(&lifecycle);
}

static peer *find_peer(uint64_t identity, int pidfd) {
    for (peer *p = watch.peers; p; p = p->next)
        if (p->identity == identity) return p;
    peer *made = pidfd < 0 ? NULL : calloc(1, sizeof *made);
    if (!made) return NULL;
    *made = (peer){.identity = identity, .next = watch.peers};
    made->pidfd = fcntl(pidfd, F_DUPFD_CLOEXEC, 3);
    if (made->pidfd < 0) {
        free(made);
        return NULL;
    }
    watch.peers = made;
    return made;
}

static void add_group(un_group *g) {
    if (g->watching.is_watched) return;
    g->watching.is_watched = true;
    g->watching.next = watch.groups;
    watch.groups = g;
}

void watch_alone(un_group *g) {
    pthread_mutex_lock(&lifecycle);
    pthread_mutex_lock(&watch.lock);
    if (start_watcher()) add_group(g);
    unlock_and_end_idle_watcher();
}

bool un_group_watch(un_group *g, int rank, uint64_t identity, int pidfd) {
    if (group_is_inherited(g) || rank < 0 || rank >= g->ranks || rank == g->rank) return false;
    pthread_mutex_lock(&lifecycle);
    pthread_mutex_lock(&watch.lock);
    peer *p = !g->watching.peers[rank] && start_watcher() ? find_peer(identity, pidfd) : NULL;
    if (p) {
        p->users++;
        g->watching.peers[rank] = p;
        add_group(g);
        if (p->dead) abort_group(g, UN_PEER_LOST, rank, 0);
        wake_watcher();
    }
    unlock_and_end_idle_watcher();
    return p != NULL;
}

bool peer_is_dead(const un_group *g, int rank, int64_t *ending) {
    pthread_mutex_lock(&watch.lock);
    peer *p = g->watching.peers[rank];
    bool dead = p && p->dead;
    if (dead && !p->ending) p->ending = ending_of(p->pidfd); /* its parent was slow */
    *ending = dead ? p->ending : 0;
    pthread_mutex_unlock(&watch.lock);
    return dead;
}

/* -1: the process is in another namespace or has ended, or there is no /proc. */
static int read_pid(int pidfd) {
    char path[64], line[64];
    int pid = 0;
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", pidfd);
    FILE *facts = fopen(path, "re");
    while (facts && !pid && fgets(line, sizeof line, facts)) sscanf(line, "Pid: %d", &pid);
    if (facts) fclose(facts);
    return pid > 0 ? pid : -1;
}

int pid_of_peer(const un_group *g, int rank) {
    pthread_mutex_lock(&watch.lock);
    peer *p = g->watching.peers[rank];
    if (p && !p->pid) p->pid = read_pid(p->pidfd);
    int pid = p && p->pid > 0 ? p->pid : 0;
    pthread_mutex_unlock(&watch.lock);
    return pid;
}

bool peer_lives(const un_group *g, int rank) {
    pthread_mutex_lock(&watch.lock);
    const peer *p = g->watching.peers[rank];
    bool lives = p && !poll(&(struct pollfd){.fd = p->pidfd, .events = POLLIN}, 1, 0);
    pthread_mutex_unlock(&watch.lock);
    return lives;
}

static void forget_peer(peer *gone) {
    for (peer **link = &watch.peers; *link; link = &(*link)->next)
        if (*link == gone) {
            *link = gone->next;
            break;
        }
    close(gone->pidfd);
    free(gone);
}

/* The group closes. The last one ends the thread. */
void stop_watching(un_group *g) {
    if (!g->watching.is_watched) return;
    pthread_mutex_lock(&lifecycle);
    pthread_mutex_lock(&watch.lock);
    for (un_group **link = &watch.groups; *link; link = &(*link)->watching.next)
        if (*link == g) {
            *link = g->watching.next;
            break;
        }
    for (int rank = 0; rank < g->ranks; rank++) {
        peer *p = g->watching.peers[rank];
        if (p && !--p->users) forget_peer(p);
        g->watching.peers[rank] = NULL;
    }
    wake_watcher();
    unlock_and_end_idle_watcher();
}
