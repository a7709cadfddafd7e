/* Each rank reads its peer's part of a block in a call, and releases the block.
 *
 * begin_reading, address_of, end_reading, un_block_release, count_release, free_released: the last one
 * gives the memory back, and nobody reads it any more. */
#include "model.h"
#include <sys/mman.h>
#define madvise(memory, bytes, advice) give_back(memory)
#define munmap(memory, bytes) ((void)(memory))
#define fstat(...) 0
struct stat {
    long st_size;
};

/* Each rank is a process of one thread, whose locks are its own. */
#define pthread_mutex_lock(lock) ((void)(lock))
#define pthread_mutex_unlock(lock) ((void)(lock))

static void give_back(char *memory);

#include "local/blocks.c"

unsigned current_process(void) { return 0; }
bool group_is_inherited(const un_group *g) { return false; }

enum { PART = 1 }; /* bytes of each rank's part */
static struct {
    block_header header;
    _Alignas(PAGE_BYTES) char part[RANKS];
} block;
static struct {
    un_block block;
    size_t start[2 * RANKS + 1];
} blocks[RANKS];
static _Atomic uint32_t users[RANKS];

static void give_back(char *memory) {
    for (int rank = 0; rank < RANKS; rank++) block.part[rank] = 0;
}

static void open_block(un_group *g) {
    un_block *b = &blocks[g->rank].block;
    b->group = g;
    b->number = 1;
    b->base = (char *)&block;
    b->bytes = sizeof block;
    b->users = &users[g->rank];
    atomic_init(b->users, 1);
    b->rank = g->rank;
    b->ranks = RANKS;
    for (int rank = 0; rank <= RANKS; rank++) b->start[rank] = (size_t)(block.part + rank - (char *)&block);
    for (int rank = 0; rank < RANKS; rank++) sizes_in(b)[rank] = PART, block.part[rank] = 1;
    g->blocks.first = b;
}

static void *read_and_release(void *argument) {
    un_group *g = argument;
    int peer = 1 - g->rank;
    begin_reading(g);
    assert(*address_of(g, peer, (place){.block = 1}, PART) == 1);
    end_reading(g);
    un_block_release(&blocks[g->rank].block);
#ifdef REOPENS
    un_block *again = g->rank ? NULL : un_block_reopen(g, 1);
    if (again) {
        assert(block.part[0] == 1);
        un_block_release(again);
    }
#endif
    return NULL;
}

int main(void) {
    open_ranks();
    for (int rank = 0; rank < RANKS; rank++) open_block(&ranks[rank]);
    run_ranks(read_and_release);
    assert(atomic_load(&block.header.released) == RANKS);
    assert(block.part[0] == 0);
    return 0;
}
