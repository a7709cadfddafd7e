/* Pages of a block in place of a process's own, so that existing memory becomes shared.
 *
 * Memory that another library has allocated, and keeps using by its address, cannot be moved to a
 * block. But the block's pages can be mapped at its address: mremap maps shared pages a second
 * time, and replaces one mapping by another.
 */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "base/group.h"

static char *if_mapped(void *address) { return address == MAP_FAILED ? NULL : address; }

static char *own_pages(char *at, size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED : 0);
    return if_mapped(mmap(at, bytes, PROT_READ | PROT_WRITE, flags, -1, 0));
}

/* Replace one mapping by another. If that fails half-way, nothing is mapped there. */
static bool move_mapping(char *from, char *to, size_t bytes) {
    return if_mapped(mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to)) != NULL;
}

bool un_share_pages(char *at, char *shared, size_t bytes) {
    char *made = shared ? if_mapped(mremap(shared, 0, bytes, MREMAP_MAYMOVE))
                        : own_pages(NULL, bytes);
    if (!made) return false;
    memcpy(made, at, bytes);
    if (move_mapping(made, at, bytes)) return true;
    bool is_own = own_pages(at, bytes);
    if (is_own) memcpy(at, made, bytes);
    munmap(made, bytes);
    return is_own && !shared;
}

bool un_protect_pages(char *at, size_t bytes) { return !mprotect(at, bytes, PROT_READ); }
