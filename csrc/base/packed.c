/* Numbers in few bits, for slow wires.
 *
 * int8 and fp8 have a scale for each block of 256 numbers, so that its largest finite one becomes
 * the largest code; the scales come first. fp8 is e4m3: 4 bits of exponent, 3 of fraction. Three codes
 * of each stand for NaN and the infinities, which a block may contain among others. bfloat16 has all
 * that by itself. What is packed depends on the numbers alone, and rounds to the nearest, ties to even.
 */
#include <math.h>
#include <string.h>

#include "base/kernels.h"
#include "base/packed.h"

enum { PACKED_BLOCK = 256 };

enum { INT8_MOST = 125, INT8_INFINITY = 126, INT8_NAN = 127 }; /* and -INT8_INFINITY */
enum { FP8_SIGN = 0x80, FP8_INFINITY = 0x7e, FP8_NAN = 0x7f };
#define FP8_MOST 416.0f /* the code before that of infinity */

static size_t blocks_of(size_t items) { return (items + PACKED_BLOCK - 1) / PACKED_BLOCK; }

size_t packed_bytes(un_wire format, size_t items) {
    return format == UN_WIRE_BFLOAT16 ? 2 * items : items + blocks_of(items) * sizeof(float);
}

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

/* The largest finite magnitude: as integers, magnitudes have the order of the numbers. */
static float largest_of(const float *x, size_t count, bool *all_finite) {
    uint32_t most = 0, others = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t magnitude = bits_of(x[i]) & 0x7fffffff;
        bool finite = magnitude < 0x7f800000;
        others |= !finite;
        magnitude = finite ? magnitude : 0;
        most = magnitude > most ? magnitude : most;
    }
    *all_finite = !others;
    return float_of(most);
}

/* For |x| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction. */
static float to_whole(float x) { return x + 0x1.8p23f - 0x1.8p23f; }

static float limit(float x, float most) { return x > most ? most : x < -most ? -most : x; }

static uint8_t to_fp8(float y) {
    uint32_t bits = bits_of(y), sign = bits >> 24 & FP8_SIGN, magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
    uint32_t small = bits_of(float_of(magnitude) + 0x1p14f) - bits_of(0x1p14f); /* in units of 2^-9 */
    return (uint8_t)(sign | (magnitude < 0x3c800000 ? small : normal - (120 << 3)));
}

static float from_fp8(uint8_t code) {
    uint32_t sign = (uint32_t)(code & FP8_SIGN) << 24, magnitude = code & 0x7f;
    float small = (float)(int32_t)magnitude * 0x1p-9f;
    float normal = float_of((magnitude << 20) + (120u << 23));
    return float_of(bits_of(magnitude < 8 ? small : normal) | sign);
}

static void pack_int8(int8_t *to, const float *from, size_t count, float scale) {
    for (size_t i = 0; i < count; i++)
        to[i] = (int8_t)(int32_t)limit(to_whole(limit(from[i] / scale, 200.0f)), INT8_MOST);
}

static void pack_fp8(uint8_t *to, const float *from, size_t count, float scale) {
    for (size_t i = 0; i < count; i++) to[i] = to_fp8(limit(from[i] / scale, FP8_MOST));
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

void pack_floats(un_wire format, char *to, const float *from, size_t items) {
    if (format == UN_WIRE_BFLOAT16) {
        const void *source = from;
        find_reducer(un_dtype_of(UN_BFLOAT, 16, 1), (un_reduction)NARROWING).run(to, &source, 1, items, 1);
        return;
    }
    float *scales = (float *)(void *)to;
    uint8_t *codes = (uint8_t *)to + blocks_of(items) * sizeof(float);
    for (size_t first = 0; first < items; first += PACKED_BLOCK) {
        size_t count = items - first < PACKED_BLOCK ? items - first : PACKED_BLOCK;
        bool all_finite;
        float most = format == UN_WIRE_INT8 ? INT8_MOST : FP8_MOST;
        float scale = largest_of(from + first, count, &all_finite) / most;
        scales[first / PACKED_BLOCK] = scale;
        if (scale == 0)
            memset(codes + first, 0, count);
        else if (format == UN_WIRE_INT8)
            pack_int8((int8_t *)codes + first, from + first, count, scale);
        else
            pack_fp8(codes + first, from + first, count, scale);
        if (!all_finite) pack_others(format, codes + first, from + first, count);
    }
}

static float other_of(un_wire format, uint8_t code) {
    if (format == UN_WIRE_INT8)
        return code == INT8_NAN ? NAN : (int8_t)code == INT8_INFINITY ? INFINITY
                                    : (int8_t)code == -INT8_INFINITY  ? -INFINITY : 0;
    return (code & 0x7f) == FP8_NAN ? NAN : (code & 0x7f) != FP8_INFINITY ? 0
                                        : code & FP8_SIGN                ? -INFINITY : INFINITY;
}

void unpack_floats(un_wire format, float *to, const char *from, size_t items) {
    if (format == UN_WIRE_BFLOAT16) {
        const void *source = from;
        find_reducer(un_dtype_of(UN_BFLOAT, 16, 1), (un_reduction)WIDENING).run(to, &source, 1, items, 1);
        return;
    }
    const float *scales = (const float *)(const void *)from;
    const uint8_t *codes = (const uint8_t *)from + blocks_of(items) * sizeof(float);
    for (size_t first = 0; first < items; first += PACKED_BLOCK) {
        size_t count = items - first < PACKED_BLOCK ? items - first : PACKED_BLOCK;
        float scale = scales[first / PACKED_BLOCK];
        const uint8_t *c = codes + first;
        float *x = to + first;
        bool others = false;
        if (format == UN_WIRE_INT8)
            for (size_t i = 0; i < count; i++) {
                int code = (int8_t)c[i];
                others |= code > INT8_MOST || code < -INT8_MOST;
                x[i] = (float)code * scale;
            }
        else
            for (size_t i = 0; i < count; i++) {
                others |= (c[i] & 0x7f) >= FP8_INFINITY;
                x[i] = from_fp8(c[i]) * scale;
            }
        for (size_t i = 0; others && i < count; i++) {
            float other = other_of(format, c[i]);
            if (other != 0) x[i] = other; /* a NaN, too */
        }
    }
}
