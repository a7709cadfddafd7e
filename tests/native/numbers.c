/* Element types, and their arithmetic by another way than the engine's: in 64-bit integers.
 *
 * Numbers of the floating types are small and whole, so that nothing is rounded and the bits of a
 * result are known. Integers use all their bits and wrap around.
 */
#include <math.h>

#include "threads.h"

enum family { SIGNED, UNSIGNED, FLOATING, BRAIN, COMPLEX, BOOLEAN, UNKNOWN };

static const struct type {
    enum family family;
    unsigned code, bits;
} types[TYPES] = {
    {SIGNED, UN_INT, 8},      {SIGNED, UN_INT, 16},      {SIGNED, UN_INT, 32},
    {SIGNED, UN_INT, 64},     {UNSIGNED, UN_UINT, 8},    {UNSIGNED, UN_UINT, 16},
    {UNSIGNED, UN_UINT, 32},  {UNSIGNED, UN_UINT, 64},   {FLOATING, UN_FLOAT, 16},
    {BRAIN, UN_BFLOAT, 16},   {FLOATING, UN_FLOAT, 32},  {FLOATING, UN_FLOAT, 64},
    {COMPLEX, UN_COMPLEX, 64}, {COMPLEX, UN_COMPLEX, 128}, {BOOLEAN, UN_BOOL, 8},
    {UNKNOWN, 10, 8}, /* one of DLPack's float8: moved, never combined */
};

un_dtype dtype_of(int type) { return un_dtype_of(types[type].code, types[type].bits, 1); }

size_t item_bytes_of(int type) { return types[type].bits / 8; }

static bool is_integer(int type) { return types[type].family <= UNSIGNED; }

double factor_for(int type) { return is_integer(type) ? -3 : 2; }

static uint64_t within(uint64_t random, int64_t low, int64_t high) {
    return (uint64_t)(low + (int64_t)(random % (uint64_t)(high - low + 1)));
}

static uint64_t plus_or_minus_one(uint64_t random) { return random & 1 ? 1 : (uint64_t)-1; }

/* No product has a zero among its factors: its sign would be lost in whole numbers. */
number choose_number(int type, un_reduction reduction, int ranks, uint64_t random) {
    unsigned unused = 64 - types[type].bits;
    switch (types[type].family) {
    case SIGNED: return (number){.re = (uint64_t)((int64_t)(random << unused) >> unused)};
    case UNSIGNED:
    case UNKNOWN: return (number){.re = random << unused >> unused};
    case BOOLEAN: return (number){.re = random & 1};
    case COMPLEX:
        if (reduction == UN_PRODUCT)
            return (number){plus_or_minus_one(random), plus_or_minus_one(random >> 32)};
        break;
    default:
        if (reduction == UN_PRODUCT) return (number){.re = within(random, 0, 1) ? 2 : (uint64_t)-1};
        break;
    }
    uint64_t scale = un_averages(reduction) ? (uint64_t)ranks : 1;
    number n = {.re = scale * within(random, -15, 15)};
    if (types[type].family == COMPLEX) n.im = scale * within(random >> 32, -15, 15);
    return n;
}

static number combine(int type, un_reduction reduction, number a, number b) {
    bool is_signed = types[type].family != UNSIGNED;
    bool less = is_signed ? (int64_t)b.re < (int64_t)a.re : b.re < a.re;
    if (types[type].family == BOOLEAN) {
        if (reduction == UN_SUM || reduction == UN_MAX) reduction = UN_BOR;
        if (reduction == UN_PRODUCT || reduction == UN_MIN) reduction = UN_BAND;
    }
    switch (reduction) {
    case UN_PRODUCT: return (number){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    case UN_MIN: return less ? b : a;
    case UN_MAX: return less ? a : b;
    case UN_BAND: return (number){.re = a.re & b.re};
    case UN_BOR: return (number){.re = a.re | b.re};
    case UN_BXOR: return (number){.re = a.re ^ b.re};
    default: return (number){a.re + b.re, a.im + b.im};
    }
}

/* A sum of integers has wrapped around by then, and loses its fraction: -7 / 2 is -3. */
static number divided(int type, number sum, int ranks) {
    unsigned unused = 64 - types[type].bits;
    if (types[type].family == UNSIGNED)
        return (number){.re = (sum.re << unused >> unused) / (uint64_t)ranks};
    if (types[type].family == SIGNED)
        return (number){.re = (uint64_t)(((int64_t)(sum.re << unused) >> unused) / ranks)};
    return (number){(uint64_t)((int64_t)sum.re / ranks), (uint64_t)((int64_t)sum.im / ranks)};
}

number reduce_numbers(int type, un_reduction reduction, const number *given, int ranks) {
    number all = given[0];
    for (int rank = 1; rank < ranks; rank++) all = combine(type, reduction, all, given[rank]);
    if (un_averages(reduction)) all = divided(type, all, ranks);
    uint64_t factor = (uint64_t)(int64_t)factor_for(type);
    if (reduction == UN_PREMUL_SUM) all = (number){all.re * factor, all.im * factor};
    return all;
}

/* The bits of a whole number in half precision. */
static uint16_t half_of(int64_t whole) {
    if (!whole) return 0;
    int exponent;
    double fraction = frexp(fabs((double)whole), &exponent); /* at least one half */
    return (uint16_t)((whole < 0) << 15 | (exponent + 14) << 10 |
                      ((int)ldexp(fraction, 11) & 0x3ff));
}

static void encode_real(unsigned bits, int64_t whole, char *to) {
    double wide = (double)whole;
    float narrow = (float)whole;
    uint16_t half = half_of(whole);
    if (bits == 64)
        memcpy(to, &wide, sizeof wide);
    else if (bits == 32)
        memcpy(to, &narrow, sizeof narrow);
    else
        memcpy(to, &half, sizeof half);
}

void encode(int type, number n, char *item) {
    unsigned bits = types[type].bits;
    float narrow = (float)(int64_t)n.re;
    switch (types[type].family) {
    case FLOATING: encode_real(bits, (int64_t)n.re, item); break;
    case BRAIN: memcpy(item, (char *)&narrow + 2, 2); break; /* its upper half */
    case COMPLEX:
        encode_real(bits / 2, (int64_t)n.re, item);
        encode_real(bits / 2, (int64_t)n.im, item + bits / 16);
        break;
    default: memcpy(item, &n.re, bits / 8); break;
    }
}
