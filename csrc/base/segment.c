/* The segment: sized and sealed by its creator, allocated slice by slice by its users. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/segment.h"
#include "base/wait.h"

static const uint64_t MAGIC = 0x6f6e6f73696e75; /* "unisono" */

size_t control_bytes_for(int ranks) {
    return round_up(sizeof(control) + 7 * (size_t)ranks * sizeof(uint64_t), PAGE_BYTES);
}

static size_t data_offset_for(int ranks) {
    return round_up(PAGE_BYTES + (size_t)ranks * control_bytes_for(ranks), SLOT_BYTES);
}

static size_t slice_bytes(void) { return 2 * SLOTS * (size_t)SLOT_BYTES; }

static size_t channel_offset_for(int ranks) {
    return data_offset_for(ranks) + (size_t)ranks * slice_bytes();
}

static size_t fifo_offset_for(int ranks) {
    size_t channels = (size_t)ranks * (size_t)ranks * sizeof(channel);
    return round_up(channel_offset_for(ranks) + channels, PAGE_BYTES);
}

static size_t segment_bytes_for(int ranks) {
    return fifo_offset_for(ranks) + (size_t)ranks * (size_t)ranks * sizeof(fifo);
}

/* An anonymous file in memory: nothing to find, nothing to leave behind. Where a sandbox forbids
 * memfd_create, an unlinked file in /dev/shm does the same, without seals. */
int nameless_file(size_t bytes) {
    int descriptor = memfd_create("unisono", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bool sealable = descriptor >= 0;
    if (!sealable && (errno == EPERM || errno == ENOSYS || errno == EACCES))
        descriptor = open("/dev/shm", O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
    if (descriptor < 0) return -1;
    if (ftruncate(descriptor, (off_t)bytes) ||
        (sealable && fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))) {
        int error = errno;
        close(descriptor);
        errno = error;
        return -1;
    }
    return descriptor;
}

/* Claim pages now, on this process's memory node, so that a limit is an error here and not a
 * SIGBUS at the first touch. The memory of a group of one is not a file. */
int allocate(int descriptor, size_t offset, size_t bytes) {
    int result = 0;
    do {
        if (descriptor >= 0) result = fallocate(descriptor, 0, (off_t)offset, (off_t)bytes);
    } while (result && errno == EINTR);
    return result;
}

int un_segment_create(int ranks, int cores, uint64_t nonce) {
    if (ranks < 1 || ranks > UN_MAX_RANKS) {
        errno = EINVAL;
        return -1;
    }
    int descriptor = nameless_file(segment_bytes_for(ranks));
    if (descriptor < 0) return -1;
    header first = {.magic = MAGIC,
                    .version = UN_LAYOUT_VERSION,
                    .ranks = (uint32_t)ranks,
                    .nonce = nonce,
                    .cores = (uint32_t)cores};
    if (allocate(descriptor, 0, PAGE_BYTES) ||
        pwrite(descriptor, &first, sizeof first, 0) != (ssize_t)sizeof first) {
        int error = errno;
        close(descriptor);
        errno = error;
        return -1;
    }
    return descriptor;
}

static void lay_out(un_group *g) {
    g->segment.control_bytes = control_bytes_for(g->ranks);
    g->segment.data_offset = data_offset_for(g->ranks);
    g->segment.channel_offset = channel_offset_for(g->ranks);
    g->segment.fifo_offset = fifo_offset_for(g->ranks);
    g->segment.bytes = segment_bytes_for(g->ranks);
}

static int allocate_control(const un_group *g, int descriptor) {
    size_t bytes = g->segment.control_bytes;
    return allocate(descriptor, PAGE_BYTES + (size_t)g->rank * bytes, bytes);
}

un_status segment_map(un_group *g, int descriptor, uint64_t nonce) {
    struct stat facts;
    lay_out(g);
    bool is_file = descriptor >= 0 || g->ranks > 1;
    if (is_file && fstat(descriptor, &facts)) return UN_SYSTEM;
    if (is_file && (size_t)facts.st_size != g->segment.bytes) return UN_MISMATCH;
    if (allocate_control(g, descriptor)) return UN_SYSTEM;
    g->segment.users = malloc(sizeof *g->segment.users);
    if (!g->segment.users) return UN_SYSTEM;
    atomic_init(g->segment.users, 1);
    g->segment.descriptor = is_file ? fcntl(descriptor, F_DUPFD_CLOEXEC, 3) : -1;
    if (is_file && g->segment.descriptor < 0) {
        free(g->segment.users);
        return UN_SYSTEM;
    }
    int flags = MAP_SHARED | MAP_NORESERVE | (is_file ? 0 : MAP_ANONYMOUS);
    g->segment.base = mmap(NULL, g->segment.bytes, PROT_READ | PROT_WRITE, flags,
                           g->segment.descriptor, 0);
    if (g->segment.base == MAP_FAILED) {
        if (is_file) close(g->segment.descriptor);
        free(g->segment.users);
        return UN_SYSTEM;
    }
    /* A forked child must not write into its parent's group; best effort on old kernels. */
    madvise(g->segment.base, g->segment.bytes, MADV_DONTFORK);
    g->segment.header = (header *)g->segment.base;
    const header *h = g->segment.header;
    if (is_file && (h->magic != MAGIC || h->version != UN_LAYOUT_VERSION || h->nonce != nonce ||
                    h->ranks != (uint32_t)g->ranks)) {
        segment_unmap(g);
        return UN_MISMATCH;
    }
    return UN_OK;
}

un_status segment_share(un_group *g, const un_group *other) {
    lay_out(g);
    g->segment.descriptor = other->segment.descriptor;
    if (allocate_control(g, g->segment.descriptor)) return UN_SYSTEM;
    g->segment.base = other->segment.base;
    g->segment.header = other->segment.header;
    g->segment.users = other->segment.users;
    atomic_fetch_add(g->segment.users, 1);
    return UN_OK;
}

void segment_unmap(un_group *g) {
    if (atomic_fetch_sub(g->segment.users, 1) > 1) return;
    munmap(g->segment.base, g->segment.bytes);
    if (g->segment.descriptor >= 0) close(g->segment.descriptor);
    free(g->segment.users);
}

/* Take or release the exclusive right to allocate. A rank that is stopped while it holds it, or
 * a file system without locks, must not block the others for long. */
static void lock_allocation(un_group *g, short kind) {
    struct flock whole = {.l_type = kind, .l_whence = SEEK_SET};
    for (int tries = 0; fcntl(g->segment.descriptor, F_SETLK, &whole) && tries < 1000; tries++) {
        if (errno != EAGAIN && errno != EACCES && errno != EINTR) return;
        sleep_ns(200 * 1000);
    }
}

/* One rank at a time checks for room and takes it: if all checked first, all would find the same
 * room, and the kernel would kill one of them. */
bool allocate_if_room(un_group *g, int descriptor, size_t offset, size_t bytes) {
    lock_allocation(g, F_WRLCK);
    bool taken = (int64_t)bytes <= un_memory_room() && !allocate(descriptor, offset, bytes);
    lock_allocation(g, F_UNLCK);
    return taken;
}

un_status prepare_slice(un_group *g) {
    size_t offset = g->segment.data_offset + (size_t)g->rank * slice_bytes();
    bool *ready = &g->segment.slice_ready;
    if (!*ready) *ready = allocate_if_room(g, g->segment.descriptor, offset, slice_bytes());
    return *ready ? UN_OK : UN_NO_MEMORY;
}

un_status prepare_channel(un_group *g, int to) {
    size_t offset = (size_t)((char *)channel_of(g, g->rank, to) - g->segment.base);
    bool taken = allocate_if_room(g, g->segment.descriptor, offset, sizeof(channel));
    return taken ? UN_OK : UN_NO_MEMORY;
}

un_status prepare_fifo(un_group *g, int to) {
    bool *ready = &g->fifos[to].ready;
    size_t offset = (size_t)((char *)fifo_of(g, g->rank, to) - g->segment.base);
    if (!*ready) *ready = allocate_if_room(g, g->segment.descriptor, offset, sizeof(fifo));
    return *ready ? UN_OK : UN_NO_MEMORY;
}
