/* The tables of reduction kernels: one per instruction set. */
#ifndef UNISONO_REDUCE_H
#define UNISONO_REDUCE_H

#include "base/kernels.h"

enum kind {
    KIND_I8,
    KIND_I16,
    KIND_I32,
    KIND_I64,
    KIND_U8,
    KIND_U16,
    KIND_U32,
    KIND_U64,
    KIND_F16,
    KIND_BF16,
    KIND_F32,
    KIND_F64,
    KIND_C64,
    KIND_C128,
    KIND_BOOL,
    KINDS,
};

typedef kernel *kernel_table[KINDS][KERNELS];

/* The table's name for an instruction set: kernels_avx2 and so on. */
#define KERNELS_JOINED(isa) kernels_##isa
#define KERNELS_OF(isa) KERNELS_JOINED(isa)

#if defined(__x86_64__)
extern const kernel_table kernels_sse2, kernels_avx2, kernels_avx512;
#else
extern const kernel_table kernels_base, kernels_fp16;
#endif

#endif
