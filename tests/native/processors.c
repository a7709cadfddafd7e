/* Every instruction set, on every processor, computes the same bits. */
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "base/reduce.h"
#include "threads.h"

enum { SOURCES = 3, ITEMS = 1003, BYTES = 16 * ITEMS };
#define DIGEST UINT64_C(0x260b5fe0624d5f6) /* of all results, whatever computes them */

static const struct { int bits, fraction; } floats[KINDS] = { /* of a number, or of its parts */
    [KIND_F16] = {16, 10}, [KIND_BF16] = {16, 7}, [KIND_F32] = {32, 23},
    [KIND_F64] = {64, 52}, [KIND_C64] = {32, 23}, [KIND_C128] = {64, 52},
};

/* Near 1, and denormal: no sum or product of three becomes infinite. */
static uint64_t random_float(int bits, int fraction, uint64_t random) {
    uint64_t bias = (UINT64_C(1) << (bits - fraction - 2)) - 1;
    uint64_t exponent = random >> 60 ? bias - 3 + (random >> 53 & 3) : 0;
    uint64_t low = random & ((UINT64_C(1) << fraction) - 1);
    return (random >> 52 & 1) << (bits - 1) | exponent << fraction | low;
}

static void fill(char *to, int kind, uint64_t seed) {
    size_t bytes = floats[kind].bits ? (size_t)floats[kind].bits / 8 : 1;
    for (size_t at = 0; at < BYTES; at += bytes) {
        uint64_t random = scramble(seed + at);
        uint64_t value = floats[kind].bits ? random_float(floats[kind].bits, floats[kind].fraction, random)
                         : kind == KIND_BOOL ? random & 1 : random;
        memcpy(to + at, &value, bytes);
    }
}

static kernel *what_packs(const kernel_table *table, int unpacks) {
    return (*table)[KIND_F32][unpacks - UNPACKING_INT8 + PACKING_INT8];
}

static uint64_t digest_of(const kernel_table *table) {
    static _Alignas(16) char from[SOURCES][BYTES], to[BYTES];
    uint64_t digest = 0;
    for (int kind = 0; kind < KINDS; kind++)
        for (int what = 0; what < KERNELS; what++) {
            kernel *run = (*table)[kind][what];
            if (!run) continue;
            bool converts = what > DIVISION, unpacks = what == UNPACKING_INT8 || what == UNPACKING_FP8;
            for (int i = 0; i < SOURCES; i++)
                fill(from[i], what == NARROWING ? KIND_F32 : kind, scramble((uint64_t)(SOURCES * kind + i)));
            if (unpacks) what_packs(table, what)(from[0], (const void *[]){from[1]}, 1, ITEMS, 1);
            memset(to, 0, BYTES);
            double factor = what != UN_PREMUL_SUM ? 3 : floats[kind].bits ? 1.0 / 3 : -3;
            run(to, (const void *[]){from[0], from[1], from[2]}, converts ? 1 : SOURCES, ITEMS, factor);
            for (size_t at = 0; at < BYTES; at += sizeof digest) {
                uint64_t word;
                memcpy(&word, to + at, sizeof word);
                digest = scramble(digest ^ word);
            }
        }
    return digest;
}

void test_processors(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    EXPECT_EQUAL(digest_of(&kernels_sse2), DIGEST);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
        EXPECT_EQUAL(digest_of(&kernels_avx2), DIGEST);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        EXPECT_EQUAL(digest_of(&kernels_avx512), DIGEST);
#else
    EXPECT_EQUAL(digest_of(&kernels_base), DIGEST);
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDHP) EXPECT_EQUAL(digest_of(&kernels_fp16), DIGEST);
#endif
}
