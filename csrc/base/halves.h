/* float16 and bfloat16 as float32 and back, STEP elements at a time.
 *
 * Today's compilers widen and round half types one by one, so this file uses vectors, with the
 * instructions of each set. They all widen exactly and round to the nearest, ties to even. A
 * bfloat16 NaN becomes the quiet NaN; a float16 NaN stays what the processor makes of it.
 */
#ifndef UNISONO_HALVES_H
#define UNISONO_HALVES_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

enum { STEP = 2 * LANES };

/* How many steps are in flight at once: enough to keep the processor's pipes busy. */
#if defined(__aarch64__)
enum { STEPS = 4 };
#else
enum { STEPS = 2 };
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t lane_bits __attribute__((vector_size(4 * LANES)));

/* STEP elements, widened; those of bfloat16 in whatever order suits the processor. */
typedef struct {
    lanes low, high;
} wide;

/* Lane by lane a where the mask has ones, b where it has zeros. */
static inline lane_bits select_bits(lane_bits mask, lane_bits a, lane_bits b) {
    return (a & mask) | (b & ~mask);
}

static inline lanes select_lanes(lane_bits mask, lanes a, lanes b) {
    return (lanes)select_bits(mask, (lane_bits)a, (lane_bits)b);
}

#if defined(__aarch64__)
#include <arm_neon.h>

static inline wide widen_half(const uint16_t *from) {
    float16x8_t half = vreinterpretq_f16_u16(vld1q_u16(from));
    return (wide){(lanes)vcvt_f32_f16(vget_low_f16(half)), (lanes)vcvt_high_f32_f16(half)};
}

static inline void round_half(uint16_t *to, wide value) {
    float16x4_t low = vcvt_f16_f32((float32x4_t)value.low);
    vst1q_u16(to, vreinterpretq_u16_f16(vcvt_high_f16_f32(low, (float32x4_t)value.high)));
}

static inline wide widen_brain(const uint16_t *from) {
    uint16x8_t brain = vld1q_u16(from), zero = vdupq_n_u16(0);
    return (wide){(lanes)vzip1q_u16(zero, brain), (lanes)vzip2q_u16(zero, brain)};
}

/* The difference of the last kept bit, as 0 or -1, and the number, rounded to its upper half:
 * with that bit a tie goes one step further, so ties go to even, but the sign of the result is
 * wrong. Five instructions for two vectors, which either of Neoverse N1's pipes can run. */
static inline uint16x8_t round_brain_lanes(wide value) {
    uint32x4_t low = (uint32x4_t)value.low, high = (uint32x4_t)value.high;
    uint32x4_t last = vdupq_n_u32(1 << 16);
    uint16x4_t negative = vrsubhn_u32(vtstq_u32(low, last), low);
    uint16x8_t both = vrsubhn_high_u32(negative, vtstq_u32(high, last), high);
    return (uint16x8_t)vnegq_s16((int16x8_t)both);
}

/* A NaN from arithmetic shows in the upper halves, too. */
static inline void round_brain(uint16_t *to, wide value) {
    uint16x8_t upper = vuzp2q_u16((uint16x8_t)value.low, (uint16x8_t)value.high);
    uint16x8_t nan = vcgtq_u16(vaddq_u16(upper, upper), vdupq_n_u16(0xff00));
    vst1q_u16(to, vbslq_u16(nan, vdupq_n_u16(0x7fc0), round_brain_lanes(value)));
}

/* Where the processor itself turns every NaN into the quiet one, they need no care. */
enum { MAKES_QUIET_NANS = 1 };

static inline uint64_t begin_quiet_nans(void) {
    const uint64_t default_nan = 1 << 25;
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
    __asm__ volatile("msr fpcr, %0" : : "r"(mode | default_nan) : "memory");
    return mode;
}

static inline void end_quiet_nans(uint64_t mode) {
    __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}

static inline void round_quiet_brain(uint16_t *to, wide value) {
    vst1q_u16(to, round_brain_lanes(value));
}

#else /* x86-64 */
#include <immintrin.h>

/* Lanes of 32 bits hold two elements each: those in the lower halves, those in the upper ones. */
static inline lane_bits load_pairs(const uint16_t *from) {
    lane_bits pairs;
    memcpy(&pairs, from, sizeof pairs);
    return pairs;
}

static inline void store_pairs(uint16_t *to, lane_bits pairs) { memcpy(to, &pairs, sizeof pairs); }

static inline wide widen_brain(const uint16_t *from) {
    lane_bits pairs = load_pairs(from);
    return (wide){(lanes)(pairs << 16), (lanes)(pairs & 0xffff0000)};
}

/* The upper 16 bits are the rounded number. */
static inline lane_bits round_brain_lanes(lanes value) {
#if defined(__AVX512F__)
    __m512i bits = (__m512i)value, up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(1 << 16));
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)value, (__m512)value, _CMP_UNORD_Q);
    up = _mm512_mask_add_epi32(up, odd, up, _mm512_set1_epi32(1));
    return (lane_bits)_mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7fc00000));
#else
    lane_bits bits = (lane_bits)value, nan = (lane_bits)(value != value);
    return select_bits(nan, (lane_bits){0} + 0x7fc00000, bits + 0x7fff + (bits >> 16 & 1));
#endif
}

static inline void round_brain(uint16_t *to, wide value) {
    lane_bits low = round_brain_lanes(value.low), high = round_brain_lanes(value.high);
    store_pairs(to, low >> 16 | (high & 0xffff0000));
}

enum { MAKES_QUIET_NANS = 0 };
static inline uint64_t begin_quiet_nans(void) { return 0; }
static inline void end_quiet_nans(uint64_t mode) { (void)mode; }
static inline void round_quiet_brain(uint16_t *to, wide value) { round_brain(to, value); }

#if defined(__AVX512F__)

/* A load from memory does not need the one pipe that moves lanes. */
static inline wide widen_half(const uint16_t *from) {
    return (wide){(lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)),
                  (lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + LANES)))};
}

static inline void round_half(uint16_t *to, wide value) {
    __m256i low = _mm512_cvtps_ph((__m512)value.low, _MM_FROUND_TO_NEAREST_INT);
    __m256i high = _mm512_cvtps_ph((__m512)value.high, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256((__m256i *)to, low);
    _mm256_storeu_si256((__m256i *)(to + LANES), high);
}

#elif defined(__F16C__)

static inline wide widen_half(const uint16_t *from) {
    return (wide){(lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)),
                  (lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + LANES)))};
}

static inline void round_half(uint16_t *to, wide value) {
    __m128i low = _mm256_cvtps_ph((__m256)value.low, _MM_FROUND_TO_NEAREST_INT);
    __m128i high = _mm256_cvtps_ph((__m256)value.high, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i *)to, low);
    _mm_storeu_si128((__m128i *)(to + LANES), high);
}

#else

/* Shift the fields into place, let a multiplication correct the exponent (subnormals included). */
static inline lanes widen_half_lanes(lane_bits half) {
    lanes scaled = (lanes)((half & 0x7fff) << 13) * 0x1p112f;
    lane_bits special = (lane_bits)((half & 0x7c00) == 0x7c00) & 0x7f800000;
    return (lanes)((lane_bits)scaled | special | (half & 0x8000) << 16);
}

static inline wide widen_half(const uint16_t *from) {
    __m128i halves = _mm_loadu_si128((const __m128i *)from), zero = _mm_setzero_si128();
    return (wide){widen_half_lanes((lane_bits)_mm_unpacklo_epi16(halves, zero)),
                  widen_half_lanes((lane_bits)_mm_unpackhi_epi16(halves, zero))};
}

static inline lane_bits round_half_lanes(lanes value) {
    lane_bits bits = (lane_bits)value, sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    lane_bits normal = (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13;
    lane_bits subnormal = (lane_bits)((lanes)bits + 0.5f) - 0x3f000000; /* has half's last bit */
    lane_bits result = select_bits((lane_bits)(bits < 0x38800000), subnormal, normal);
    result = select_bits((lane_bits)(bits >= 0x477ff000), (lane_bits){0} + 0x7c00, result);
    result = select_bits((lane_bits)(bits > 0x7f800000), (lane_bits){0} + 0x7e00, result);
    return result | sign;
}

static inline void round_half(uint16_t *to, wide value) {
    __m128i low = _mm_slli_epi32((__m128i)round_half_lanes(value.low), 16);
    __m128i high = _mm_slli_epi32((__m128i)round_half_lanes(value.high), 16);
    low = _mm_packs_epi32(_mm_srai_epi32(low, 16), _mm_srai_epi32(high, 16)); /* of signed ones */
    _mm_storeu_si128((__m128i *)to, low);
}

#endif
#endif
#endif
