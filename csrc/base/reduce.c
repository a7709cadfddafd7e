/* Arithmetic: combine one array from each rank, element by element, in rank order.
 *
 * The order of a sum depends only on the ranks, so a result is bitwise the same on every rank, at
 * every message size and however it is cut. Half precision is widened to float32, combined there
 * and rounded once. This file is compiled once for each useful instruction set; kernels.c picks one
 * at run time.
 */
#include "base/reduce.h"

#include "base/codes.h"
#include "base/halves.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 512 }; /* elements whose partial results stay in the first-level cache */

/* out[i] = VALUE for a block. The output may be one of the inputs; `ivdep` promises that it does
 * not overlap them at an offset. */
#define FOR_BLOCK(VALUE) _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) out[i] = VALUE;

/* One kernel: LOAD widens a stored T to an A, COMBINE joins two A, FINISH makes a T of an A. */
#define KERNEL(NAME, T, A, LOAD, COMBINE, FINISH)                                               \
    static __attribute__((noinline)) void NAME##_onto(A *restrict partial, const T *restrict x, \
                                                      size_t n, A scale) {                      \
        (void)scale;                                                                            \
        for (size_t i = 0; i < n; i++) partial[i] = COMBINE(partial[i], LOAD(x[i]));            \
    }                                                                                           \
    static void NAME(void *to, const void *const *from, int sources, size_t count,              \
                     double factor) {                                                           \
        const A scale = (A)(factor);                                                            \
        (void)scale;                                                                            \
        A partial[BLOCK];                                                                       \
        for (size_t start = 0; start < count; start += BLOCK) {                                 \
            size_t n = count - start < BLOCK ? count - start : BLOCK;                           \
            T *out = (T *)to + start;                                                           \
            const T *x = (const T *)from[0] + start;                                            \
            const T *y = (const T *)from[sources - 1] + start;                                  \
            if (sources == 1) {                                                                 \
                FOR_BLOCK(FINISH(LOAD(x[i])))                                                   \
            } else if (sources == 2) {                                                          \
                FOR_BLOCK(FINISH(COMBINE(LOAD(x[i]), LOAD(y[i]))))                              \
            } else {                                                                            \
                const T *z = (const T *)from[1] + start;                                        \
                for (size_t i = 0; i < n; i++) partial[i] = COMBINE(LOAD(x[i]), LOAD(z[i]));    \
                for (int s = 2; s < sources - 1; s++)                                           \
                    NAME##_onto(partial, (const T *)from[s] + start, n, scale);                 \
                FOR_BLOCK(FINISH(COMBINE(partial[i], LOAD(y[i]))))                              \
            }                                                                                   \
        }                                                                                       \
    }

#define SAME(x) (x)
#define SCALED(x) ((x) * scale)
#define QUOTIENT(x) ((x) / scale)
#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) (1u * (a) * (b)) /* 1u: small integers must not overflow a signed int */
#define MULTIPLY_FLOAT(a, b) ((a) * (b))
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define XOR(a, b) ((a) ^ (b))
#define LESSER(a, b) ((b) < (a) ? (b) : (a))
#define GREATER(a, b) ((b) > (a) ? (b) : (a))
/* A NaN wins, as in torch.minimum. */
#define LESSER_FLOAT(a, b) (((b) < (a)) | ((b) != (b)) ? (b) : (a))
#define GREATER_FLOAT(a, b) (((b) > (a)) | ((b) != (b)) ? (b) : (a))

/* A sum of integers wraps around in its own type before it is divided: C would widen it. The
 * divisor may not fit that type. */
#define OVER_RANKS_U8(x) ((uint8_t)(x) / sources)
#define OVER_RANKS_U16(x) ((uint16_t)(x) / sources)
#define OVER_RANKS_U(x) ((x) / (unsigned)sources)
#define OVER_RANKS_I8(x) ((int8_t)(x) / sources)
#define OVER_RANKS_I16(x) ((int16_t)(x) / sources)
#define OVER_RANKS_I32(x) ((int32_t)(x) / sources)
#define OVER_RANKS_I64(x) ((int64_t)(x) / sources)
#define OVER_FACTOR_U8(x) ((uint8_t)(x) / (int)factor)
#define OVER_FACTOR_U16(x) ((uint16_t)(x) / (int)factor)
#define OVER_FACTOR_I8(x) ((int8_t)(x) / (int)factor)
#define OVER_FACTOR_I16(x) ((int16_t)(x) / (int)factor)
#define OVER_FACTOR_I32(x) ((int32_t)(x) / (int)factor)
#define OVER_FACTOR_I64(x) ((int64_t)(x) / (int)factor)

/* Signed integers add, multiply and combine bits as unsigned ones do: both wrap around. */
#define INTEGER_KERNELS(B)                                               \
    KERNEL(sum_u##B, uint##B##_t, uint##B##_t, SAME, ADD, SAME)          \
    KERNEL(product_u##B, uint##B##_t, uint##B##_t, SAME, MULTIPLY, SAME) \
    KERNEL(band_u##B, uint##B##_t, uint##B##_t, SAME, AND, SAME)         \
    KERNEL(bor_u##B, uint##B##_t, uint##B##_t, SAME, OR, SAME)           \
    KERNEL(bxor_u##B, uint##B##_t, uint##B##_t, SAME, XOR, SAME)         \
    KERNEL(min_u##B, uint##B##_t, uint##B##_t, SAME, LESSER, SAME)       \
    KERNEL(max_u##B, uint##B##_t, uint##B##_t, SAME, GREATER, SAME)      \
    KERNEL(min_i##B, int##B##_t, int##B##_t, SAME, LESSER, SAME)         \
    KERNEL(max_i##B, int##B##_t, int##B##_t, SAME, GREATER, SAME)
INTEGER_KERNELS(8)
INTEGER_KERNELS(16)
INTEGER_KERNELS(32)
INTEGER_KERNELS(64)

#define AVERAGE_KERNELS(B, UNSIGNED, SIGNED, UNSIGNED_QUOTIENT, SIGNED_QUOTIENT) \
    KERNEL(avg_u##B, uint##B##_t, uint##B##_t, SAME, ADD, UNSIGNED)              \
    KERNEL(avg_i##B, uint##B##_t, uint##B##_t, SAME, ADD, SIGNED)                \
    KERNEL(divide_u##B, uint##B##_t, uint##B##_t, SAME, ADD, UNSIGNED_QUOTIENT)  \
    KERNEL(divide_i##B, uint##B##_t, uint##B##_t, SAME, ADD, SIGNED_QUOTIENT)
AVERAGE_KERNELS(8, OVER_RANKS_U8, OVER_RANKS_I8, OVER_FACTOR_U8, OVER_FACTOR_I8)
AVERAGE_KERNELS(16, OVER_RANKS_U16, OVER_RANKS_I16, OVER_FACTOR_U16, OVER_FACTOR_I16)
AVERAGE_KERNELS(32, OVER_RANKS_U, OVER_RANKS_I32, QUOTIENT, OVER_FACTOR_I32)
AVERAGE_KERNELS(64, OVER_RANKS_U, OVER_RANKS_I64, QUOTIENT, OVER_FACTOR_I64)

/* A whole factor scales integers; it goes through int64, so that a negative one wraps right. */
#define SCALED_INTEGER(x) (1u * (x) * whole)
#define PREMUL_KERNEL(B)                                                                  \
    static void premul_u##B(void *to, const void *const *from, int sources, size_t count, \
                            double factor) {                                              \
        const uint##B##_t whole = (uint##B##_t)(int64_t)factor;                           \
        for (size_t i = 0; i < count; i++) {                                              \
            uint##B##_t sum = 0;                                                          \
            for (int s = 0; s < sources; s++)                                             \
                sum += (uint##B##_t)SCALED_INTEGER(((const uint##B##_t *)from[s])[i]);    \
            ((uint##B##_t *)to)[i] = sum;                                                 \
        }                                                                                 \
    }
PREMUL_KERNEL(8)
PREMUL_KERNEL(16)
PREMUL_KERNEL(32)
PREMUL_KERNEL(64)

/* A power of two divides as its inverse multiplies, to the bit, but takes several times as long. */
#define AVERAGE_KERNEL(KIND)                                                             \
    static void avg_##KIND(void *to, const void *const *from, int sources, size_t count, \
                           double factor) {                                              \
        (void)factor;                                                                    \
        if (sources & (sources - 1))                                                     \
            divide_##KIND(to, from, sources, count, sources);                            \
        else                                                                             \
            scaled_##KIND(to, from, sources, count, 1.0 / sources);                      \
    }

/* Half types, STEP elements at a time; the last few too, in a copy. LOAD, COMBINE and FINISH
 * work on lanes of float32; QUIET says whether they compute, so that every NaN is new, and the
 * processor can be told once, instead of in each step, to make it the quiet one. */
enum { MANY = 256 }; /* elements from which on telling it pays */

#define EACH_STEP _Pragma("GCC unroll 4") for (int k = 0; k < STEPS; k++)

typedef void rounding(uint16_t *to, wide value);

#define HALF_KERNEL(NAME, WIDEN, LOAD, COMBINE, FINISH, ROUND, QUIET)                              \
    static inline wide NAME##_load(const uint16_t *from, float scale) {                            \
        wide read = WIDEN(from);                                                                   \
        (void)scale;                                                                               \
        return (wide){LOAD(read.low), LOAD(read.high)};                                            \
    }                                                                                              \
    static inline wide NAME##_combine(wide a, wide b) {                                            \
        return (wide){COMBINE(a.low, b.low), COMBINE(a.high, b.high)};                             \
    }                                                                                              \
    static inline wide NAME##_finish(wide sum, float scale) {                                      \
        (void)scale;                                                                               \
        return (wide){FINISH(sum.low), FINISH(sum.high)};                                          \
    }                                                                                              \
    /* STEPS steps at once, as far as possible; returns how many elements. */                      \
    static inline __attribute__((always_inline)) size_t NAME##_steps(                              \
        uint16_t *out, const void *const *from, int sources, size_t count, float scale,            \
        rounding *round) {                                                                         \
        const uint16_t *x = from[0], *y = from[sources - 1];                                       \
        wide sums[STEPS];                                                                          \
        size_t i = 0;                                                                              \
        if (sources == 2)                                                                          \
            for (; i + STEPS * STEP <= count; i += STEPS * STEP) {                                 \
                EACH_STEP sums[k] = NAME##_load(x + i + k * STEP, scale);                          \
                EACH_STEP sums[k] = NAME##_combine(sums[k], NAME##_load(y + i + k * STEP, scale)); \
                EACH_STEP round(out + i + k * STEP, NAME##_finish(sums[k], scale));                \
            }                                                                                      \
        for (; i + STEPS * STEP <= count; i += STEPS * STEP) {                                     \
            EACH_STEP sums[k] = NAME##_load(x + i + k * STEP, scale);                              \
            for (int s = 1; s < sources; s++) {                                                    \
                const uint16_t *z = (const uint16_t *)from[s] + i;                                 \
                EACH_STEP sums[k] = NAME##_combine(sums[k], NAME##_load(z + k * STEP, scale));     \
            }                                                                                      \
            EACH_STEP round(out + i + k * STEP, NAME##_finish(sums[k], scale));                    \
        }                                                                                          \
        return i;                                                                                  \
    }                                                                                              \
    static void NAME(void *to, const void *const *from, int sources, size_t count,                 \
                     double factor) {                                                              \
        const float scale = (float)factor;                                                         \
        uint16_t *out = to;                                                                        \
        size_t i;                                                                                  \
        if (MAKES_QUIET_NANS && (QUIET) && count >= MANY) {                                        \
            uint64_t mode = begin_quiet_nans();                                                    \
            i = NAME##_steps(out, from, sources, count, scale, round_quiet_brain);                 \
            end_quiet_nans(mode);                                                                  \
        } else {                                                                                   \
            i = NAME##_steps(out, from, sources, count, scale, ROUND);                             \
        }                                                                                          \
        for (; i < count; i += STEP) {                                                             \
            size_t rest = sizeof(uint16_t) * (count - i < STEP ? count - i : STEP);                \
            uint16_t few[STEP] = {0};                                                              \
            wide sum = NAME##_load(memcpy(few, (const uint16_t *)from[0] + i, rest), scale);       \
            for (int s = 1; s < sources; s++) {                                                    \
                memcpy(few, (const uint16_t *)from[s] + i, rest);                                  \
                sum = NAME##_combine(sum, NAME##_load(few, scale));                                \
            }                                                                                      \
            ROUND(few, NAME##_finish(sum, scale));                                                 \
            memcpy(out + i, few, rest);                                                            \
        }                                                                                          \
    }

#define LESSER_LANES(a, b) select_lanes((lane_bits)((b < a) | (b != b)), b, a)
#define GREATER_LANES(a, b) select_lanes((lane_bits)((b > a) | (b != b)), b, a)

#define HALF_KERNELS(KIND, WIDEN, ROUND, IS_BRAIN)                                                \
    HALF_KERNEL(divide_##KIND, WIDEN, SAME, ADD, QUOTIENT, ROUND, IS_BRAIN)                       \
    HALF_KERNEL(sum_##KIND, WIDEN, SAME, ADD, SAME, ROUND, IS_BRAIN &&sources > 1)                \
    HALF_KERNEL(scaled_##KIND, WIDEN, SAME, ADD, SCALED, ROUND, IS_BRAIN)                         \
    AVERAGE_KERNEL(KIND)                                                                          \
    HALF_KERNEL(product_##KIND, WIDEN, SAME, MULTIPLY_FLOAT, SAME, ROUND, IS_BRAIN &&sources > 1) \
    HALF_KERNEL(min_##KIND, WIDEN, SAME, LESSER_LANES, SAME, ROUND, 0)                            \
    HALF_KERNEL(max_##KIND, WIDEN, SAME, GREATER_LANES, SAME, ROUND, 0)                           \
    HALF_KERNEL(premul_##KIND, WIDEN, SCALED, ADD, SAME, ROUND, IS_BRAIN)
HALF_KERNELS(f16, widen_half, round_half, 0)
HALF_KERNELS(bf16, widen_brain, round_brain, 1)

static inline void store_wide(float *to, wide value) {
    memcpy(to, &value.low, sizeof value.low);
    memcpy(to + LANES, &value.high, sizeof value.high);
}

static inline wide load_wide(const float *from) {
    wide value;
    memcpy(&value.low, from, sizeof value.low);
    memcpy(&value.high, from + LANES, sizeof value.high);
    return value;
}

/* Between half types and float32. Compilers do bfloat16 well by themselves. */
static void widen_f16(void *to, const void *const *from, int sources, size_t count, double factor) {
    (void)sources, (void)factor;
    const uint16_t *x = from[0];
    float *out = to, wider[STEP];
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) store_wide(out + i, widen_half(x + i));
    uint16_t few[STEP] = {0};
    memcpy(few, x + i, (count - i) * sizeof *few);
    store_wide(wider, widen_half(few));
    memcpy(out + i, wider, (count - i) * sizeof *out);
}

static void narrow_f16(void *to, const void *const *from, int sources, size_t count,
                       double factor) {
    (void)sources, (void)factor;
    const float *x = from[0];
    uint16_t *out = to, few[STEP];
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) round_half(out + i, load_wide(x + i));
    float rest[STEP] = {0};
    memcpy(rest, x + i, (count - i) * sizeof *rest);
    round_half(few, load_wide(rest));
    memcpy(out + i, few, (count - i) * sizeof *few);
}

static void widen_bf16(void *to, const void *const *from, int sources, size_t count,
                       double factor) {
    (void)sources, (void)factor;
    const uint16_t *x = from[0];
    uint32_t *out = to;
    for (size_t i = 0; i < count; i++) out[i] = (uint32_t)x[i] << 16;
}

static void narrow_bf16(void *to, const void *const *from, int sources, size_t count,
                        double factor) {
    (void)sources, (void)factor;
    const uint32_t *x = from[0];
    uint16_t *out = to;
    for (size_t i = 0; i < count; i++) {
        uint32_t rounded = (x[i] + 0x7fff + (x[i] >> 16 & 1)) >> 16;
        out[i] = (uint16_t)((x[i] & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

/* Adding or multiplying two float16 numbers in float32 and rounding gives the same as the
 * processor's own float16 arithmetic: float32 has over twice the digits, so rounding twice
 * equals rounding once. */
#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#define NATIVE_KERNEL(NAME, COMBINE)                                                          \
    static void native_##NAME(void *to, const void *const *from, int sources, size_t count,   \
                              double factor) {                                                \
        const float16_t *x = from[0], *y = from[sources - 1];                                 \
        float16_t *out = to;                                                                  \
        if (sources != 2) {                                                                   \
            NAME(to, from, sources, count, factor);                                           \
            return;                                                                           \
        }                                                                                     \
        _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) out[i] = COMBINE(x[i], y[i]); \
    }
NATIVE_KERNEL(sum_f16, ADD)
NATIVE_KERNEL(product_f16, MULTIPLY_FLOAT)

/* Half of a rounded sum is the rounded half: where the half is subnormal, the sum was exact.
 * Only a sum that overflows is computed from halves instead, which are exact there. */
static void native_avg_f16(void *to, const void *const *from, int sources, size_t count,
                           double factor) {
    const float16x8_t half = vdupq_n_f16((float16_t)0.5), infinity = vdupq_n_f16(INFINITY);
    const uint16_t *x = from[0], *y = from[sources - 1];
    size_t i = 0;
    for (; sources == 2 && i + STEP <= count; i += STEP) {
        float16x8_t a = (float16x8_t)vld1q_u16(x + i), b = (float16x8_t)vld1q_u16(y + i);
        float16x8_t sum = vaddq_f16(a, b);
        float16x8_t halves = vaddq_f16(vmulq_f16(a, half), vmulq_f16(b, half));
        float16x8_t mean = vbslq_f16(vcageq_f16(sum, infinity), halves, vmulq_f16(sum, half));
        vst1q_u16((uint16_t *)to + i, (uint16x8_t)mean);
    }
    const void *rest[] = {x + i, y + i};
    avg_f16((uint16_t *)to + i, i ? rest : from, sources, count - i, factor);
}
#else
#define native_sum_f16 sum_f16
#define native_product_f16 product_f16
#define native_avg_f16 avg_f16
#endif

#define FLOAT_KERNELS(KIND, T, A, LOAD, FINISH, LOAD_SCALED, FINISH_SCALED, FINISH_QUOTIENT) \
    KERNEL(divide_##KIND, T, A, LOAD, ADD, FINISH_QUOTIENT)                                  \
    KERNEL(sum_##KIND, T, A, LOAD, ADD, FINISH)                                              \
    KERNEL(scaled_##KIND, T, A, LOAD, ADD, FINISH_SCALED)                                    \
    AVERAGE_KERNEL(KIND)                                                                     \
    KERNEL(product_##KIND, T, A, LOAD, MULTIPLY_FLOAT, FINISH)                               \
    KERNEL(min_##KIND, T, A, LOAD, LESSER_FLOAT, FINISH)                                     \
    KERNEL(max_##KIND, T, A, LOAD, GREATER_FLOAT, FINISH)                                    \
    KERNEL(premul_##KIND, T, A, LOAD_SCALED, ADD, FINISH)
FLOAT_KERNELS(f32, float, float, SAME, SAME, SCALED, SCALED, QUOTIENT)
FLOAT_KERNELS(f64, double, double, SAME, SAME, SCALED, SCALED, QUOTIENT)

/* Complex numbers add and scale like pairs of reals; only their product differs. */
#define COMPLEX_PRODUCT(NAME, REAL)                                                              \
    static void NAME(void *to, const void *const *from, int sources, size_t count,               \
                     double factor) {                                                            \
        (void)factor;                                                                            \
        for (size_t i = 0; i < count; i++) {                                                     \
            REAL re = ((const REAL *)from[0])[2 * i], im = ((const REAL *)from[0])[2 * i + 1];   \
            for (int s = 1; s < sources; s++) {                                                  \
                REAL c = ((const REAL *)from[s])[2 * i], d = ((const REAL *)from[s])[2 * i + 1]; \
                REAL product = re * c - im * d;                                                  \
                im = re * d + im * c;                                                            \
                re = product;                                                                    \
            }                                                                                    \
            ((REAL *)to)[2 * i] = re;                                                            \
            ((REAL *)to)[2 * i + 1] = im;                                                        \
        }                                                                                        \
    }
COMPLEX_PRODUCT(product_c64, float)
COMPLEX_PRODUCT(product_c128, double)

#define INTEGER_ROW(SIGN, B)             \
    {[UN_SUM] = sum_u##B,                \
     [UN_PRODUCT] = product_u##B,        \
     [UN_MIN] = min_##SIGN##B,           \
     [UN_MAX] = max_##SIGN##B,           \
     [UN_BAND] = band_u##B,              \
     [UN_BOR] = bor_u##B,                \
     [UN_BXOR] = bxor_u##B,              \
     [UN_PREMUL_SUM] = premul_u##B,      \
     [UN_TRUNCATED_AVG] = avg_##SIGN##B, \
     [DIVISION] = divide_##SIGN##B}
#define FLOAT_ROW(KIND, ...)                                                                       \
    {[UN_SUM] = sum_##KIND,           [UN_AVG] = avg_##KIND,      [UN_PRODUCT] = product_##KIND,   \
     [UN_MIN] = min_##KIND,           [UN_MAX] = max_##KIND,      [UN_PREMUL_SUM] = premul_##KIND, \
     [UN_TRUNCATED_AVG] = avg_##KIND, [DIVISION] = divide_##KIND, __VA_ARGS__}
#define COMPLEX_ROW(KIND, PART)                                        \
    {[UN_SUM] = sum_##PART,           [UN_AVG] = avg_##PART,           \
     [UN_PRODUCT] = product_##KIND,   [UN_PREMUL_SUM] = premul_##PART, \
     [UN_TRUNCATED_AVG] = avg_##PART, [DIVISION] = divide_##PART}

const kernel_table KERNELS_OF(UN_ISA) = {
    [KIND_I8] = INTEGER_ROW(i, 8),
    [KIND_I16] = INTEGER_ROW(i, 16),
    [KIND_I32] = INTEGER_ROW(i, 32),
    [KIND_I64] = INTEGER_ROW(i, 64),
    [KIND_U8] = INTEGER_ROW(u, 8),
    [KIND_U16] = INTEGER_ROW(u, 16),
    [KIND_U32] = INTEGER_ROW(u, 32),
    [KIND_U64] = INTEGER_ROW(u, 64),
    [KIND_F16] = {[UN_SUM] = native_sum_f16,
                  [UN_AVG] = native_avg_f16,
                  [UN_PRODUCT] = native_product_f16,
                  [UN_MIN] = min_f16,
                  [UN_MAX] = max_f16,
                  [UN_PREMUL_SUM] = premul_f16,
                  [UN_TRUNCATED_AVG] = native_avg_f16,
                  [DIVISION] = divide_f16,
                  [WIDENING] = widen_f16,
                  [NARROWING] = narrow_f16},
    [KIND_BF16] = FLOAT_ROW(bf16, [WIDENING] = widen_bf16, [NARROWING] = narrow_bf16),
    [KIND_F32] = FLOAT_ROW(f32, [PACKING_INT8] = pack_int8s, [PACKING_FP8] = pack_fp8s,
                           [UNPACKING_INT8] = unpack_int8s, [UNPACKING_FP8] = unpack_fp8s),
    [KIND_F64] = FLOAT_ROW(f64, ),
    [KIND_C64] = COMPLEX_ROW(c64, f32),
    [KIND_C128] = COMPLEX_ROW(c128, f64),
    /* 0 and 1: a sum is "any", a product "all", as in torch */
    [KIND_BOOL] = {[UN_SUM] = bor_u8,
                   [UN_PRODUCT] = band_u8,
                   [UN_MIN] = band_u8,
                   [UN_MAX] = bor_u8,
                   [UN_BAND] = band_u8,
                   [UN_BOR] = bor_u8,
                   [UN_BXOR] = bxor_u8},
};
