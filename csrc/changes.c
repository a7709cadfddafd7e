/* What changed between two versions of a row of elements: where, and the new bits.
 *
 * A byte counts the elements that stayed, and the next one as it is now follows; 255 stands for 255
 * that stayed, and nothing follows. A change costs its element and a byte, the rest 1/255 each.
 */
#include <string.h>

#include "unisono.h"

enum { BLOCK = 64, STAYED = 255 };
typedef uint64_t words __attribute__((vector_size(16), aligned(1)));

typedef struct packing {
    unsigned char *to, *end;
    size_t told; /* elements */
} packing;

static inline __attribute__((always_inline)) bool pack_block(packing *p, char *old, const char *new,
                                                             size_t first, size_t size) {
    const uint64_t lane = size == 8 ? ~(uint64_t)0 : ((uint64_t)1 << 8 * size) - 1;
    for (size_t word = 0; word < BLOCK; word += 8) {
        uint64_t before, now;
        memcpy(&before, old + word, 8);
        memcpy(&now, new + word, 8);
        for (uint64_t differs = before ^ now; differs;) { /* little-endian: the lowest comes first */
            size_t at = (size_t)__builtin_ctzll(differs) / 8 / size;
            size_t stayed = first + word / size + at - p->told;
            size_t skips = stayed / STAYED;
            if ((size_t)(p->end - p->to) < skips + 1 + size) return false;
            memset(p->to, STAYED, skips);
            p->to += skips;
            *p->to++ = (unsigned char)(stayed % STAYED);
            memcpy(p->to, new + word + at * size, size);
            p->to += size;
            p->told += stayed + 1;
            differs &= ~(lane << 8 * size * at);
        }
        memcpy(old + word, &now, 8);
    }
    return true;
}

static inline __attribute__((always_inline)) ptrdiff_t pack(char *old, const char *new, size_t bytes,
                                                            size_t size, char *to, size_t room) {
    packing p = {(unsigned char *)to, (unsigned char *)to + room, 0};
    size_t done = 0;
    for (; done + BLOCK <= bytes; done += BLOCK) {
        words differs = {0};
        for (size_t i = done; i < done + BLOCK; i += sizeof differs)
            differs |= *(const words *)(old + i) ^ *(const words *)(new + i);
        if ((differs[0] | differs[1]) && !pack_block(&p, old + done, new + done, done / size, size))
            return -1;
    }
    char last_old[BLOCK] = {0}, last_new[BLOCK] = {0};
    memcpy(last_old, old + done, bytes - done);
    memcpy(last_new, new + done, bytes - done);
    if (!pack_block(&p, last_old, last_new, done / size, size)) return -1;
    memcpy(old + done, new + done, bytes - done);
    return p.to - (unsigned char *)to;
}

ptrdiff_t un_pack_changes(char *old, const char *new, size_t bytes, size_t size, char *to,
                          size_t room) {
    if (size == 1) return pack(old, new, bytes, 1, to, room);
    if (size == 2) return pack(old, new, bytes, 2, to, room);
    if (size == 4) return pack(old, new, bytes, 4, to, room);
    return pack(old, new, bytes, 8, to, room);
}

bool un_apply_changes(char *at, size_t bytes, size_t size, const char *from, size_t length) {
    const unsigned char *next = (const unsigned char *)from, *end = next + length;
    size = size < 8 ? size : 8;
    for (char *last = at + bytes; next < end;) {
        size_t stayed = *next++;
        if ((size_t)(last - at) < (stayed + (stayed != STAYED)) * size) return false;
        at += stayed * size;
        if (stayed == STAYED) continue;
        if ((size_t)(end - next) < size) return false;
        memcpy(at, next, size);
        next += size;
        at += size;
    }
    return true;
}
