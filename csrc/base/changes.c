/* What changed between two versions of a row of elements: where, and the new bits.
 *
 * A byte counts unchanged elements, and the new value of the next element follows; 255 means 255
 * unchanged elements and no value. A change costs its element and a byte, an unchanged element
 * 1/255 byte.
 */
#include <string.h>

#include "unisono.h"

enum { WORD = 8, STAYED = 255 };

static size_t unit(size_t size) { return size < WORD ? size : WORD; }

static inline uint64_t load(const char *from, size_t bytes) {
    uint64_t word = 0;
    if (bytes >= WORD) return memcpy(&word, from, WORD), word; /* one instruction */
    return memcpy(&word, from, bytes), word;
}

ptrdiff_t un_pack_changes(char *old, const char *new, size_t bytes, size_t size, char *to,
                          size_t room) {
    char *next = to, *end = to + room;
    size = unit(size);
    int shift = __builtin_ctzll(size);
    for (size_t at = 0, packed = 0; at < bytes; at += WORD) {
        uint64_t differ = load(old + at, bytes - at) ^ load(new + at, bytes - at);
        while (differ) { /* little-endian: the lowest bits come first */
            size_t i = (size_t)__builtin_ctzll(differ) / 8 & ~(size - 1), after = i + size;
            size_t stayed = (at + i - packed) >> shift;
            if ((size_t)(end - next) < stayed / STAYED + 1 + size) return -1;
            for (; stayed >= STAYED; stayed -= STAYED) *next++ = (char)STAYED;
            *next++ = (char)stayed;
            memcpy(next, new + at + i, size);
            memcpy(old + at + i, new + at + i, size);
            next += size;
            packed = at + after;
            differ = after < WORD ? differ >> 8 * after << 8 * after : 0;
        }
    }
    return next - to;
}

bool un_apply_changes(char *at, size_t bytes, size_t size, const char *from, size_t length) {
    const unsigned char *next = (const unsigned char *)from, *end = next + length;
    size = unit(size);
    for (char *last = at + bytes; next < end;) {
        size_t stayed = *next++, follows = stayed == STAYED ? 0 : size;
        if ((size_t)(last - at) < stayed * size + follows || (size_t)(end - next) < follows)
            return false;
        memcpy(at + stayed * size, next, follows);
        next += follows;
        at += stayed * size + follows;
    }
    return true;
}
