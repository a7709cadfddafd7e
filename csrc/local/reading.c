/* A peer's own memory, read by the kernel (process_vm_readv): one copy where slots need two.
 *
 * The kernel may refuse that for a process (other namespaces, Yama, sandboxes) or for some of
 * its memory (a driver's). A process ID may be of another namespace if /proc is, or may belong
 * to a program that the process has since exec'd. So each read begins with a proof, a word that
 * only that rank's process has, and only while it is in the group. If the proof fails, no rank
 * tries again. */
#define _GNU_SOURCE
#include <sys/uio.h>

#include "local/reading.h"
#include "base/watcher.h"

static uint64_t proof_of(const un_group *g, int rank) {
    return (g->segment.header->nonce ^ (uint64_t)(rank + 1)) * 0x9e3779b97f4a7c15u;
}

void offer_reading(un_group *g) {
    g->reading.proof = proof_of(g, g->rank);
    write_word(&control_of(g, g->rank)->proof, (uintptr_t)&g->reading.proof);
}

bool read_peer(un_group *g, int rank, char *to, uint64_t from, size_t bytes) {
    uint64_t proof = 0;
    struct iovec here[] = {{&proof, sizeof proof}, {to, bytes}};
    void *their_proof = (void *)(uintptr_t)read_word(&control_of(g, rank)->proof);
    struct iovec there[] = {{their_proof, sizeof proof}, {(void *)(uintptr_t)from, bytes}};
    int pid = pid_of_peer(g, rank);
    ssize_t had = pid ? process_vm_readv(pid, here, 2, there, 2, 0) : 0;
    if (proof != proof_of(g, rank)) {
        forbid_reading(g);
        return false;
    }
    atomic_fetch_add_explicit(&g->reading.count, 1, memory_order_relaxed);
    return had == (ssize_t)(sizeof proof + bytes);
}
