/* Tuning: in what pieces calls move, and from how many bytes on they go another way. */
#include <stdint.h>
#include <stdio.h>

#include "internal.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

enum {
    /* The most that one turn moves of a part, so that slots and the pieces which they came from
     * stay in the second-level cache: 1 MiB on Neoverse N1, 2 MiB on Sapphire Rapids, where these
     * were measured. */
#if defined(__x86_64__)
    TURN_BYTES = 128 * 1024,
#else
    TURN_BYTES = 64 * 1024,
#endif
    CUT_TURN_BYTES = 128 * 1024, /* of which every rank combines its share */
    LEAST_TURN_BYTES = 4096,
    LEAST_FROM_BYTES = 64,
};

static const size_t MOST_FROM_BYTES = (size_t)1 << 40;

un_tuning un_default_tuning(int ranks, bool crowded) {
    /* From how many bytes on the second meeting of "cut" costs less than combining everything. */
    size_t cut_from = crowded ? 64 * 1024 : ranks == 2 ? 32 * 1024 : 32 * 1024 / (size_t)ranks;
    return (un_tuning){
        .cut_from = cut_from,
        /* From here on reading a peer's memory, and waiting until it was read, costs less than what
         * goes through slots. Where cores are few, waiting costs more. */
        .direct_from = crowded ? 64 * 1024 : 4 * 1024,
        .bypass_from = 8 * 1024 * 1024,
        .all_reduce_turn = CUT_TURN_BYTES,
        .broadcast_turn = TURN_BYTES,
        .all_gather_turn = TURN_BYTES,
        .reduce_scatter_turn = TURN_BYTES,
        .all_to_all_turn = TURN_BYTES,
    };
}

static bool is_turn(size_t bytes) {
    return bytes >= LEAST_TURN_BYTES && bytes <= SLOT_BYTES && bytes % LINE_BYTES == 0;
}

static bool is_from(size_t bytes) { return bytes >= LEAST_FROM_BYTES && bytes <= MOST_FROM_BYTES; }

bool un_group_tune(un_group *g, const un_tuning *t) {
    bool sound = is_from(t->cut_from) && is_from(t->direct_from) && is_from(t->bypass_from) &&
                 is_turn(t->all_reduce_turn) && is_turn(t->broadcast_turn) &&
                 is_turn(t->all_gather_turn) && is_turn(t->reduce_scatter_turn) &&
                 is_turn(t->all_to_all_turn);
    if (sound) g->tuning = *t;
    return sound;
}

un_tuning un_group_tuning(const un_group *g) { return g->tuning; }

bool un_group_is_crowded(const un_group *g) { return g->crowded; }

void un_processor_model(char text[UN_MODEL_BYTES]) {
    snprintf(text, UN_MODEL_BYTES, "unknown");
#if defined(__x86_64__)
    unsigned words[12] = {0};
    bool known = true;
    for (unsigned leaf = 0; leaf < 3; leaf++) {
        unsigned *w = words + 4 * leaf;
        known = known && __get_cpuid(0x80000002u + leaf, &w[0], &w[1], &w[2], &w[3]);
    }
    if (known) snprintf(text, UN_MODEL_BYTES, "%.48s", (const char *)words);
#elif defined(__aarch64__)
    enum { CAN_READ_REGISTER = 1 << 11 }; /* HWCAP_CPUID: the kernel answers */
    if (getauxval(AT_HWCAP) & CAN_READ_REGISTER) {
        uint64_t midr;
        __asm__("mrs %0, MIDR_EL1" : "=r"(midr));
        snprintf(text, UN_MODEL_BYTES, "midr %08llx", (unsigned long long)midr);
    }
#endif
}
