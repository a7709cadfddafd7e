/* Numbers in few bits, for slow wires. */
#ifndef UNISONO_PACKED_H
#define UNISONO_PACKED_H

#include "base/kernels.h"

enum { PACKED_BLOCK = 256 };
static inline size_t packed_blocks(size_t items) {
    return (items + PACKED_BLOCK - 1) / PACKED_BLOCK;
}

size_t packed_bytes(un_wire format, size_t items);
void pack_floats(un_wire format, char *to, const float *from, size_t items);
void unpack_floats(un_wire format, float *to, const char *from, size_t items);

#endif
