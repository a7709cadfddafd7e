/* Floats as int8 or fp8 and back, for slow wires.
 *
 * Each block of 256 numbers has a scale, so that its largest finite one becomes the largest code; the
 * scales come first. fp8 is e4m3: 4 bits of exponent, 3 of fraction. Three codes of each stand for NaN and
 * the infinities, which a block may contain among others. What is packed depends on the numbers alone,
 * on every processor, and rounds to the nearest, ties to even.
 */
#ifndef UNISONO_CODES_H
#define UNISONO_CODES_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/packed.h"

enum { INT8_MOST = 125, INT8_INFINITY = 126, INT8_NAN = 127 }; /* and -INT8_INFINITY */
enum { FP8_SIGN = 0x80, FP8_INFINITY = 0x7e, FP8_NAN = 0x7f };
#define FP8_MOST 416.0f /* the code before that of infinity */

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The loops below have no branches and no conversions of floats, so that compilers make vectors. */

enum { EXPONENT = 0x7f800000 };

static uint32_t finite_or_zero(float x) {
    uint32_t bits = bits_of(x);
    return (bits & EXPONENT) == EXPONENT ? 0 : bits;
}

/* The largest finite magnitude: as integers, magnitudes have the order of the numbers. */
static float largest_of(const float *x, size_t count, bool *all_finite) {
    int32_t most = 0, largest = 0;
    for (size_t i = 0; i < count; i++) {
        int32_t magnitude = bits_of(x[i]) & 0x7fffffff, finite = finite_or_zero(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
        most = finite > most ? finite : most;
    }
    *all_finite = largest < EXPONENT;
    return float_of((uint32_t)most);
}

static uint8_t to_fp8(float y) {
    int32_t bits = (int32_t)bits_of(y), magnitude = bits & 0x7fffffff;
    int32_t normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
    int32_t small = (int32_t)(bits_of(float_of((uint32_t)magnitude) + 0x1p14f) - bits_of(0x1p14f));
    int32_t is_small = -(magnitude < 0x3c800000); /* then in units of 2^-9 */
    int32_t code = (small & is_small) | ((normal - (120 << 3)) & ~is_small);
    return (uint8_t)(code | (bits >> 24 & FP8_SIGN));
}

static float from_fp8(uint8_t code) {
    uint32_t sign = (uint32_t)(code & FP8_SIGN) << 24, magnitude = code & 0x7f;
    float small = (float)(int32_t)magnitude * 0x1p-9f;
    float normal = float_of((magnitude << 20) + (120u << 23));
    uint32_t is_small = -(uint32_t)(magnitude < 8);
    return float_of((bits_of(small) & is_small) | (bits_of(normal) & ~is_small) | sign);
}

/* Adding 1.5 * 2^23 leaves no room for a fraction: the lowest byte is the whole number. */
static void pack_int8(uint8_t *restrict to, const float *restrict from, size_t count, float scale) {
    for (size_t i = 0; i < count; i++)
        to[i] = (uint8_t)bits_of(float_of(finite_or_zero(from[i])) / scale + 0x1.8p23f);
}

static void pack_fp8(uint8_t *restrict to, const float *restrict from, size_t count, float scale) {
    for (size_t i = 0; i < count; i++) to[i] = to_fp8(float_of(finite_or_zero(from[i])) / scale);
}

static bool unpack_int8(float *restrict to, const uint8_t *restrict codes, size_t count,
                        float scale) {
    int32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        int32_t code = (int8_t)codes[i], magnitude = code < 0 ? -code : code;
        largest = magnitude > largest ? magnitude : largest;
        to[i] = (float)code * scale;
    }
    return largest > INT8_MOST;
}

static bool unpack_fp8(float *restrict to, const uint8_t *restrict codes, size_t count,
                       float scale) {
    int32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        int32_t magnitude = codes[i] & 0x7f;
        largest = magnitude > largest ? magnitude : largest;
        to[i] = from_fp8(codes[i]) * scale;
    }
    return largest >= FP8_INFINITY;
}

/* Codes of what is not finite; the rest is there. */
static void pack_others(un_wire format, uint8_t *to, const float *from, size_t count) {
    bool is_int = format == UN_WIRE_INT8;
    for (size_t i = 0; i < count; i++) {
        if (isnan(from[i])) to[i] = is_int ? INT8_NAN : FP8_NAN;
        if (isinf(from[i]) && is_int)
            to[i] = (uint8_t)(from[i] > 0 ? INT8_INFINITY : -INT8_INFINITY);
        else if (isinf(from[i]))
            to[i] = from[i] > 0 ? FP8_INFINITY : FP8_INFINITY | FP8_SIGN;
    }
}

static void pack_codes(un_wire format, char *to, const float *from, size_t items) {
    float *scales = (float *)(void *)to;
    uint8_t *codes = (uint8_t *)to + packed_blocks(items) * sizeof(float);
    for (size_t first = 0; first < items; first += PACKED_BLOCK) {
        size_t count = items - first < PACKED_BLOCK ? items - first : PACKED_BLOCK;
        bool all_finite;
        float most = format == UN_WIRE_INT8 ? INT8_MOST : FP8_MOST;
        float scale = largest_of(from + first, count, &all_finite) / most;
        if (scale < FLT_MIN) scale = 0; /* its quotients would be inexact */
        scales[first / PACKED_BLOCK] = scale;
        if (scale == 0)
            memset(codes + first, 0, count);
        else if (format == UN_WIRE_INT8)
            pack_int8(codes + first, from + first, count, scale);
        else
            pack_fp8(codes + first, from + first, count, scale);
        if (!all_finite) pack_others(format, codes + first, from + first, count);
    }
}

static float other_of(un_wire format, uint8_t code) {
    if (format == UN_WIRE_INT8)
        return code == INT8_NAN                 ? NAN
               : (int8_t)code == INT8_INFINITY  ? INFINITY
               : (int8_t)code == -INT8_INFINITY ? -INFINITY
                                                : 0;
    return (code & 0x7f) == FP8_NAN        ? NAN
           : (code & 0x7f) != FP8_INFINITY ? 0
           : code & FP8_SIGN               ? -INFINITY
                                           : INFINITY;
}

static void unpack_codes(un_wire format, float *to, const char *from, size_t items) {
    const float *scales = (const float *)(const void *)from;
    const uint8_t *codes = (const uint8_t *)from + packed_blocks(items) * sizeof(float);
    for (size_t first = 0; first < items; first += PACKED_BLOCK) {
        size_t count = items - first < PACKED_BLOCK ? items - first : PACKED_BLOCK;
        float scale = scales[first / PACKED_BLOCK];
        const uint8_t *c = codes + first;
        float *x = to + first;
        bool others = format == UN_WIRE_INT8 ? unpack_int8(x, c, count, scale)
                                             : unpack_fp8(x, c, count, scale);
        for (size_t i = 0; others && i < count; i++) {
            float other = other_of(format, c[i]);
            if (other != 0) x[i] = other; /* a NaN, too */
        }
    }
}

#define CODE_KERNELS(NAME, FORMAT)                                                             \
    static void pack_##NAME##s(void *to, const void *const *from, int sources, size_t count,   \
                               double factor) {                                                \
        (void)sources, (void)factor;                                                           \
        pack_codes(FORMAT, to, from[0], count);                                                \
    }                                                                                          \
    static void unpack_##NAME##s(void *to, const void *const *from, int sources, size_t count, \
                                 double factor) {                                              \
        (void)sources, (void)factor;                                                           \
        unpack_codes(FORMAT, to, from[0], count);                                              \
    }
CODE_KERNELS(int8, UN_WIRE_INT8)
CODE_KERNELS(fp8, UN_WIRE_FP8)

#endif
