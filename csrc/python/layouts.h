/* Where the elements of a tensor lie, and whether they overlap those of another. */
#ifndef UNISONO_LAYOUTS_H
#define UNISONO_LAYOUTS_H

#include "unisono.h"

/* The range of addresses of a tensor. */
typedef struct extent {
    const char *first, *end;
    size_t tensor; /* its index in its side */
    bool written;
} extent;
extent extent_of(const char *data, const un_layout *layout, size_t bytes); /* NULL: contiguous */

/* Whether two elements of a tensor share memory. */
bool overlaps_itself(const char *data, const un_layout *layout);

/* Whether an element of one tensor shares memory with one of the other. */
bool tensors_meet(const char *a, const un_layout *a_layout, size_t a_bytes, const char *b,
                  const un_layout *b_layout, size_t b_bytes);

#endif
