/* Arithmetic: the choice among kernels. */
#ifndef UNISONO_KERNELS_H
#define UNISONO_KERNELS_H

#include "unisono.h"

typedef void kernel(void *to, const void *const *from, int sources, size_t count, double factor);
typedef struct reducer {
    kernel *run; /* NULL: the reduction is not defined for the type */
    size_t unit; /* bytes that count as one element for `run` */
} reducer;
reducer find_reducer(un_dtype dtype, un_reduction reduction);
/* Not reductions: one source, or the sum of several, divided by `factor`; one source of a half type,
 * as float32, or of float32 as that type; and of float32 to codes and back, see codes.h. */
enum {
    DIVISION = UN_REDUCTIONS,
    WIDENING,
    NARROWING,
    PACKING_INT8,
    PACKING_FP8,
    UNPACKING_INT8,
    UNPACKING_FP8,
    KERNELS
};

static inline bool is_half(un_dtype dtype) {
    return dtype == un_dtype_of(UN_FLOAT, 16, 1) || dtype == un_dtype_of(UN_BFLOAT, 16, 1);
}

#endif
