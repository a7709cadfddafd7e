/* Blocks: memory that all members of a group map, with a part for each rank.
 *
 * Until it releases the block, a rank may pass memory of its part to a call, and its peers then
 * read it through their own mappings. So a mapping outlives this process's use of it until no rank
 * uses the block. The last release returns the pages to the system, wherever they are still mapped.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "local/blocks.h"
#include "base/segment.h"
#include "base/wait.h"

typedef struct block_header {  /* the first page of a block */
    _Atomic uint32_t released; /* ranks that have released it */
} block_header;

struct un_block {
    un_group *group; /* NULL: the group is closed */
    un_block *next;  /* of the group's */
    uint64_t number; /* 0: not in use yet */
    char *base;
    size_t bytes;
    _Atomic uint32_t *users; /* blocks of this process over this mapping */
    unsigned process;
    bool released;
    int rank, ranks;
    size_t start[]; /* of each rank's part and, last, of the end; then the parts' sizes */
};

static size_t *sizes_in(const un_block *b) { return (size_t *)b->start + b->ranks + 1; }

/* Where each part starts; false: the sizes are impossible. */
static bool lay_out(int ranks, const uint64_t *bytes, size_t *start) {
    start[0] = PAGE_BYTES;
    for (int rank = 0; rank < ranks; rank++) {
        if (bytes[rank] > (uint64_t)1 << 46) return false;
        start[rank + 1] = start[rank] + round_up(bytes[rank], PAGE_BYTES);
    }
    return true;
}

int un_block_create(int ranks, const uint64_t *bytes) {
    size_t start[UN_MAX_RANKS + 1];
    if (ranks < 1 || ranks > UN_MAX_RANKS || !lay_out(ranks, bytes, start)) {
        errno = ENOMEM;
        return -1;
    }
    int descriptor = nameless_file(start[ranks]);
    if (descriptor >= 0 && allocate(descriptor, 0, PAGE_BYTES)) {
        int error = errno;
        close(descriptor);
        errno = error;
        return -1;
    }
    return descriptor;
}

enum { LITTLE = 1024, LOOK_SERVES_S = 1 };

/* Reading the memory limits takes most of a millisecond. The result is reused for a second: in
 * that time this process may take a small share of it without reading again. */
static bool is_little(size_t bytes) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static int64_t left, looked_ns;
    pthread_mutex_lock(&lock);
    int64_t now = clock_ns();
    if (!looked_ns || now - looked_ns > LOOK_SERVES_S * (int64_t)1000000000) {
        left = un_memory_room() / LITTLE;
        looked_ns = now;
    }
    bool little = (int64_t)bytes <= left;
    if (little) left -= (int64_t)bytes;
    pthread_mutex_unlock(&lock);
    return little;
}

static bool claim(un_group *g, int descriptor, size_t offset, size_t bytes) {
    if (is_little(bytes)) return !allocate(descriptor, offset, bytes);
    return allocate_if_room(g, descriptor, offset, bytes);
}

static un_block *make_block(un_group *g) {
    size_t words = 2 * (size_t)g->ranks + 1;
    un_block *b = calloc(1, sizeof *b + words * sizeof *b->start);
    if (!b) return NULL;
    b->group = g;
    b->process = g->process;
    b->rank = g->rank;
    b->ranks = g->ranks;
    return b;
}

/* The group holds the block from now on: it needs it when it closes. */
static void enter(un_block *b) {
    un_group *g = b->group;
    pthread_mutex_lock(&g->blocks.lock);
    b->next = g->blocks.first;
    g->blocks.first = b;
    pthread_mutex_unlock(&g->blocks.lock);
}

un_status un_block_open(un_group *g, int descriptor, const uint64_t *bytes, un_block **block) {
    if (group_is_inherited(g)) return UN_FORKED;
    un_block *b = make_block(g);
    if (!b) return UN_SYSTEM;
    struct stat facts;
    un_status status = UN_SYSTEM;
    if (!lay_out(g->ranks, bytes, b->start)) goto failed;
    for (int rank = 0; rank < g->ranks; rank++) sizes_in(b)[rank] = bytes[rank];
    b->bytes = b->start[g->ranks];
    if (fstat(descriptor, &facts)) goto failed;
    status = UN_MISMATCH;
    if ((size_t)facts.st_size != b->bytes) goto failed;
    status = UN_NO_MEMORY;
    size_t mine = b->start[g->rank + 1] - b->start[g->rank];
    if (mine && !claim(g, descriptor, b->start[g->rank], mine)) goto failed;
    status = UN_SYSTEM;
    b->users = malloc(sizeof *b->users);
    if (!b->users) goto failed;
    atomic_init(b->users, 1);
    b->base = mmap(NULL, b->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor,
                   0);
    if (b->base == MAP_FAILED) goto failed;
    enter(b);
    *block = b;
    return UN_OK;

failed:;
    int error = errno;
    free(b->users);
    free(b);
    errno = error;
    return status;
}

un_status un_block_open_beside(un_group *g, un_block *other, un_block **block) {
    un_block *b = make_block(g);
    if (!b) return UN_SYSTEM;
    memcpy(b->start, other->start, (2 * (size_t)g->ranks + 1) * sizeof *b->start);
    b->bytes = other->bytes;
    b->base = other->base;
    b->users = other->users;
    atomic_fetch_add(b->users, 1);
    enter(b);
    *block = b;
    return UN_OK;
}

char *un_block_part(const un_block *b, int rank, size_t *bytes) {
    *bytes = sizes_in(b)[rank];
    return b->base + b->start[rank];
}

static void free_block(un_block *b) {
    if (atomic_fetch_sub(b->users, 1) == 1) {
        munmap(b->base, b->bytes);
        free(b->users);
    }
    free(b);
}

static block_header *header_of(const un_block *b) { return (block_header *)b->base; }

/* With the lock: free blocks that no rank can pass to a call any more. */
static void free_released(un_group *g) {
    if (g->blocks.readers) return;
    bool over = read_word(&g->segment.header->abort);
    for (un_block **link = &g->blocks.first; *link;) {
        un_block *b = *link;
        bool unused = !b->number || over ||
                      atomic_load(&header_of(b)->released) == (uint32_t)b->ranks;
        if (b->released && unused) {
            *link = b->next;
            free_block(b);
        } else {
            link = &b->next;
        }
    }
}

/* The last rank returns the pages at once: others may take long to notice. */
static void count_release(un_block *b) {
    uint32_t before = b->number ? atomic_fetch_add(&header_of(b)->released, 1) : 0;
    if (before + 1 == (uint32_t)b->ranks && b->bytes > PAGE_BYTES)
        madvise(b->base + PAGE_BYTES, b->bytes - PAGE_BYTES, MADV_REMOVE);
}

/* A closing group may race with the last owner of a block here. */
static pthread_mutex_t leaving = PTHREAD_MUTEX_INITIALIZER;

void un_block_use(un_block *b, uint64_t number) {
    pthread_mutex_lock(&leaving);
    un_group *g = b->group;
    if (g) {
        pthread_mutex_lock(&g->blocks.lock);
        b->number = number;
        atomic_fetch_add(&g->blocks.count, 1);
        free_released(g);
        pthread_mutex_unlock(&g->blocks.lock);
    }
    pthread_mutex_unlock(&leaving);
}

void un_block_release(un_block *b) {
    if (b->process != current_process()) { /* a forked child's copy of the mapping */
        free_block(b);
        return;
    }
    pthread_mutex_lock(&leaving);
    un_group *g = b->group;
    if (g) {
        pthread_mutex_lock(&g->blocks.lock);
        if (b->number) atomic_fetch_sub(&g->blocks.count, 1);
        count_release(b);
        b->released = true;
        free_released(g);
        pthread_mutex_unlock(&g->blocks.lock);
    } else {
        count_release(b);
        free_block(b);
    }
    pthread_mutex_unlock(&leaving);
}

/* Undo one release, unless it was the last: then the contents are gone. */
static bool take_back_release(un_block *b) {
    uint32_t seen = atomic_load(&header_of(b)->released);
    while (seen < (uint32_t)b->ranks)
        if (atomic_compare_exchange_weak(&header_of(b)->released, &seen, seen - 1)) return true;
    return false;
}

un_block *un_block_reopen(un_group *g, uint64_t number) {
    if (group_is_inherited(g)) return NULL;
    un_block *found = NULL;
    pthread_mutex_lock(&g->blocks.lock);
    for (un_block *b = g->blocks.first; b && !found; b = b->next)
        if (b->number == number && b->released && take_back_release(b)) found = b;
    if (found) {
        found->released = false;
        atomic_fetch_add(&g->blocks.count, 1);
    }
    pthread_mutex_unlock(&g->blocks.lock);
    return found;
}

void leave_blocks(un_group *g) {
    pthread_mutex_lock(&leaving);
    while (g->blocks.first) {
        un_block *b = g->blocks.first;
        g->blocks.first = b->next;
        b->group = NULL;
        if (b->released) free_block(b);
    }
    pthread_mutex_unlock(&leaving);
}

/* -- for calls --------------------------------------------------------------------------------- */

static int owner_in(const un_block *b, const char *data, size_t bytes) {
    if (data < b->base || data >= b->base + b->bytes) return -1;
    size_t offset = (size_t)(data - b->base);
    for (int rank = 0; rank < b->ranks; rank++)
        if (offset >= b->start[rank] && offset + bytes <= b->start[rank] + sizes_in(b)[rank])
            return rank;
    return -1;
}

int un_group_owner(un_group *g, const char *data, size_t bytes) {
    if (!atomic_load_explicit(&g->blocks.count, memory_order_relaxed) || group_is_inherited(g))
        return -1;
    int owner = -1;
    pthread_mutex_lock(&g->blocks.lock);
    for (const un_block *b = g->blocks.first; b && owner < 0; b = b->next)
        if (b->number && !b->released) owner = owner_in(b, data, bytes);
    pthread_mutex_unlock(&g->blocks.lock);
    return owner;
}

bool find_place(un_group *g, const char *data, size_t bytes, place *found) {
    bool is_ours = false;
    pthread_mutex_lock(&g->blocks.lock);
    for (const un_block *b = g->blocks.first; b && !is_ours; b = b->next) {
        const char *mine = b->base + b->start[g->rank];
        is_ours = b->number && !b->released && data >= mine &&
                  data + bytes <= mine + sizes_in(b)[g->rank];
        if (is_ours) *found = (place){b->number, (size_t)(data - mine)};
    }
    pthread_mutex_unlock(&g->blocks.lock);
    return is_ours;
}

void begin_reading(un_group *g) {
    pthread_mutex_lock(&g->blocks.lock);
    g->blocks.readers++;
    pthread_mutex_unlock(&g->blocks.lock);
}

char *address_of(un_group *g, int rank, place where, size_t bytes) {
    char *address = NULL;
    pthread_mutex_lock(&g->blocks.lock);
    for (const un_block *b = g->blocks.first; b; b = b->next) {
        if (b->number != where.block) continue;
        size_t room = sizes_in(b)[rank];
        if (where.offset <= room && bytes <= room - where.offset)
            address = b->base + b->start[rank] + where.offset;
        break;
    }
    pthread_mutex_unlock(&g->blocks.lock);
    return address;
}

void end_reading(un_group *g) {
    pthread_mutex_lock(&g->blocks.lock);
    g->blocks.readers--;
    free_released(g);
    pthread_mutex_unlock(&g->blocks.lock);
}
