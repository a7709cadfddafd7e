/* Nobody sleeps through what it waits for: a rank that publishes looks for sleepers afterwards, and
 * one that falls asleep says so before it looks once more. If either order were lost, a processor's
 * store buffer would let both look too early, and the sleeper would be woken by its slice's end, 50 ms
 * later: a rare loss of speed that no result shows. The kernel's own look at the word hides most of
 * it, for it takes longer than stores are held back. So the futexes are played here, as quickly as the
 * kernel's rules allow: two ranks that sleep at the same time have lost a call to wake up. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdarg.h>
#include <sys/syscall.h>

#include "base/wait.h"
#include "checked_messages.h"

enum { RANKS = 2, LONGEST_S = 8 };
#ifdef __SANITIZE_THREAD__ /* makes every access slow, and orders more than the processor does */
enum { ROUNDS = 20 * 1000 };
static void fence(void) {} /* which it does not know */
#else
enum { ROUNDS = 1000 * 1000 };
static void fence(void) { atomic_thread_fence(memory_order_seq_cst); }
#endif
enum state { AWAKE, FALLING, ASLEEP };

typedef struct bed {
    _Alignas(LINE_BYTES) _Atomic int state;
    _Atomic uintptr_t word;
} bed;

static _Atomic bool is_played;
static _Atomic long lost, slept;
static bed beds[RANKS];
static _Thread_local bed *mine;

/* As the kernel does: first it can be woken, then it looks at the word, then it sleeps. */
static long lie_down(const _Atomic uint32_t *word, uint32_t seen) {
    const bed *other = &beds[mine == beds];
    atomic_store(&mine->word, (uintptr_t)word);
    atomic_store(&mine->state, FALLING);
    fence();
    int falling = FALLING;
    if (atomic_load(word) != seen || !atomic_compare_exchange_strong(&mine->state, &falling, ASLEEP)) {
        atomic_store(&mine->state, AWAKE);
        return -1;
    }
    atomic_fetch_add_explicit(&slept, 1, memory_order_relaxed);
    for (int looks = 1; atomic_load(&mine->state) == ASLEEP; looks++) {
        int asleep = ASLEEP;
        if (looks % 4096 == 0) sleep_ms(1); /* whoever should wake us may need the core */
        if (atomic_load(&other->state) == ASLEEP &&
            atomic_compare_exchange_strong(&mine->state, &asleep, AWAKE))
            atomic_fetch_add(&lost, 1);
    }
    return 0;
}

static long rouse(const _Atomic uint32_t *word) {
    fence();
    for (int rank = 0; rank < RANKS; rank++)
        if (atomic_load(&beds[rank].word) == (uintptr_t)word) atomic_store(&beds[rank].state, AWAKE);
    return 0;
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);

/* What the engine calls in place of syscall: see CMakeLists.txt. */
long __wrap_syscall(long number, ...) {
    va_list list;
    long a[6];
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number != SYS_futex || !atomic_load_explicit(&is_played, memory_order_relaxed))
        return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    const _Atomic uint32_t *word = (const void *)a[0];
    return (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT ? lie_down(word, (uint32_t)a[2]) : rouse(word);
}

typedef struct meetings {
    bool by_messages;
    _Alignas(LINE_BYTES) _Atomic uint64_t rounds; /* fewer than planned where cores are scarce */
} meetings;

/* Rounds that begin now before and now after the other rank's, by less than a call takes or more. */
static void meet(membership *me) {
    meetings *m = me->shared;
    const un_call forever = {.timeout_ns = -1};
    const int64_t end = clock_ns() + LONGEST_S * SECOND_NS;
    un_call all = barrier();
    checked_message message;
    prepare_message(&message, !me->rank, me->rank, 1 - me->rank, 1, 1, CONTIGUOUS);
    mine = &beds[me->rank];
    me->group->spin = me->group->messages.spin = (spinning){.before_trial = UINT32_MAX};
    for (uint64_t round = 0; round < atomic_load_explicit(&m->rounds, memory_order_relaxed); round++) {
        uint64_t pauses = scramble(round * RANKS + (uint64_t)me->rank) % (8 << round % 4);
        for (uint64_t i = 0; i < pauses; i++) relax_cpu();
        EXPECT_EQUAL(m->by_messages ? un_message_run(me->group, &message.message, &forever)
                                    : un_run(me->group, &all),
                     UN_OK);
        if (!me->rank && round % 256 == 0 && clock_ns() > end) /* rank 1 is in the next at most */
            atomic_store(&m->rounds, round + 3);
    }
    free_side(&message.side);
}

void test_sleepers(void) {
    atomic_store(&is_played, true);
    for (int by_messages = 0; by_messages < 2; by_messages++) {
        meetings m = {.by_messages = by_messages, .rounds = by_messages ? ROUNDS / 4 : ROUNDS};
        run_ranks(RANKS, 1, meet, &m);
        EXPECT_EQUAL(atomic_exchange(&lost, 0), 0);
        EXPECT(atomic_exchange(&slept, 0) > 0);
    }
    atomic_store(&is_played, false);
}
