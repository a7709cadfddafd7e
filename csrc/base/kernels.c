/* From an element type and a reduction to the kernel that computes it on this processor. */
#include "base/reduce.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

static const kernel_table *table_for_this_processor(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &kernels_avx512;
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    return avx2 ? &kernels_avx2 : &kernels_sse2;
#else
    return getauxval(AT_HWCAP) & HWCAP_ASIMDHP ? &kernels_fp16 : &kernels_base;
#endif
}

/* The kind of an element type, or -1 for one without arithmetic (float8, complex32, ...). */
static int kind_of(un_dtype dtype) {
    switch (dtype) {
#define TYPE(code, bits) ((code) | (bits) << 8 | 1 << 16)
    case TYPE(UN_INT, 8): return KIND_I8;
    case TYPE(UN_INT, 16): return KIND_I16;
    case TYPE(UN_INT, 32): return KIND_I32;
    case TYPE(UN_INT, 64): return KIND_I64;
    case TYPE(UN_UINT, 8): return KIND_U8;
    case TYPE(UN_UINT, 16): return KIND_U16;
    case TYPE(UN_UINT, 32): return KIND_U32;
    case TYPE(UN_UINT, 64): return KIND_U64;
    case TYPE(UN_FLOAT, 16): return KIND_F16;
    case TYPE(UN_BFLOAT, 16): return KIND_BF16;
    case TYPE(UN_FLOAT, 32): return KIND_F32;
    case TYPE(UN_FLOAT, 64): return KIND_F64;
    case TYPE(UN_COMPLEX, 64): return KIND_C64;
    case TYPE(UN_COMPLEX, 128): return KIND_C128;
    case TYPE(UN_BOOL, 8): return KIND_BOOL;
#undef TYPE
    default: return -1;
    }
}

reducer find_reducer(un_dtype dtype, un_reduction reduction) {
    static const kernel_table *_Atomic chosen;
    const kernel_table *table = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (!table) {
        table = table_for_this_processor();
        atomic_store_explicit(&chosen, table, memory_order_relaxed);
    }
    int kind = kind_of(dtype);
    if (kind < 0 || (int)reduction >= KERNELS) return (reducer){0};
    size_t bytes = (dtype >> 8 & 0xff) / 8;
    bool by_halves = (kind == KIND_C64 || kind == KIND_C128) && reduction != UN_PRODUCT;
    return (reducer){.run = (*table)[kind][reduction], .unit = by_halves ? bytes / 2 : bytes};
}

bool un_reducible(un_dtype dtype, un_reduction reduction) {
    return reduction < UN_REDUCTIONS && find_reducer(dtype, reduction).run != NULL;
}
