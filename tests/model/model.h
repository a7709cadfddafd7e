/* What the engine's files need under GenMC: its own functions are theirs, the system is this one.
 *
 * A harness includes this file, then the engine's .c files whose functions it checks, and defines
 * what those need of others. Sleeping and waking are the kernel's futex, with its promises alone: the
 * comparison and the entry into the queue are one step, a full barrier comes before either side looks.
 * Nobody wakes up by himself, so whoever sleeps through a wake-up never ends: a liveness violation; with
 * SLICES, so many sleeps end because their time is over. */
#define _GNU_SOURCE
#include <assert.h>
#include <genmc.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* What GenMC's own headers lack: of threads and signals, which nobody here has; and allocation. */
#define _SIGNAL_H
typedef int pthread_once_t, sigset_t;
#define PTHREAD_ONCE_INIT 0
#define pthread_once(once, body) ((void)(body))
#define pthread_atfork(...) 0
#define pthread_mutex_destroy(lock) ((void)(lock))
#define sigfillset(set) ((void)(set))
#define pthread_sigmask(...) 0
#define getpid() 1
#define calloc(count, bytes) (assert(false), (void *)(count + bytes))
#define aligned_alloc calloc
#define realloc(old, bytes) malloc(bytes) /* grown once */
#define free(memory) ((void)(memory))
#undef close /* a macro of theirs; `reach` has a function of that name */

/* -- bytes: each an access that must not race -------------------------------------------------- */

static inline void *copy_bytes(void *to, const void *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) ((char *)to)[i] = ((const char *)from)[i];
    return to;
}

static inline void *fill_bytes(void *to, int value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) ((char *)to)[i] = (char)value;
    return to;
}

#define memcpy copy_bytes
#define memset fill_bytes
#define strnlen(text, most) 1
#define snprintf(...) 0

/* -- time stands still --------------------------------------------------------------------------- */

#define clock_gettime(clock, now) (*(now) = (struct timespec){.tv_sec = 1})
#define nanosleep(...) __VERIFIER_assume(false)
#define sched_getcpu() 0
#define sched_getaffinity(...) 1
#define sched_setaffinity(...) 1
#define sched_yield() 0
#define __builtin_ia32_pause() ((void)0)
#define __builtin_ia32_rdtsc() 1
#define __builtin_prefetch(address) ((void)(address))

/* -- futex --------------------------------------------------------------------------------------- */

enum { MOST_SLEEPS = 8 };

static struct {
    pthread_mutex_t lock;
    int sleeps;
    const void *word[MOST_SLEEPS];
    _Atomic int woken[MOST_SLEEPS];
} futexes;

/* A process's own words have 32 bits. Those of the segment that ranks sleep on are flags, but for the
 * doorbell: an access has the size of the word, of which the kernel looks at the lower half. */
static uint32_t load_lower_half(const void *word, bool is_private);

#ifdef SLICES

static void model_wait(const void *word, uint32_t seen, bool is_private) {
    static int slept; /* of one sleeper */
    __VERIFIER_assume(slept++ < SLICES);
}

static void model_wake(const void *word, uint32_t most) {}

#else

static void model_wait(const void *word, uint32_t seen, bool is_private) {
    atomic_thread_fence(memory_order_seq_cst);
    pthread_mutex_lock(&futexes.lock);
    uint32_t now = load_lower_half(word, is_private);
    int me = now == seen ? futexes.sleeps++ : -1;
    if (me >= 0) futexes.word[me] = word;
    pthread_mutex_unlock(&futexes.lock);
    if (me < 0) return;
    while (!atomic_load_explicit(&futexes.woken[me], memory_order_relaxed))
        ;
}

static void model_wake(const void *word, uint32_t most) {
    atomic_thread_fence(memory_order_seq_cst);
    pthread_mutex_lock(&futexes.lock);
    for (int i = 0; i < futexes.sleeps && most; i++) {
        if (futexes.word[i] != word) continue;
        futexes.word[i] = NULL;
        most--;
        atomic_store_explicit(&futexes.woken[i], 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(&futexes.lock);
}

#endif

#define syscall(number, word, operation, value, ...)                                                \
    (((operation) & FUTEX_CMD_MASK) == FUTEX_WAIT                                                   \
         ? model_wait(word, value, (operation) & FUTEX_PRIVATE_FLAG)                                \
         : model_wake(word, value))

/* -- ranks: threads over one segment -------------------------------------------------------------- */

#include "base/group.h"

#ifndef RANKS
#define RANKS 2
#endif

enum { CONTROL_BYTES = (sizeof(control) + 7 * RANKS * 8 + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES };

static struct {
    _Alignas(PAGE_BYTES) char head[PAGE_BYTES];
    char controls[RANKS * CONTROL_BYTES];
    char data[RANKS * 2 * SLOTS * SLOT_BYTES];
    _Alignas(PAGE_BYTES) channel channels[RANKS * RANKS];
    _Alignas(PAGE_BYTES) fifo fifos[RANKS * RANKS];
} segment;

static un_group ranks[RANKS];

static void open_ranks(void) {
    for (int rank = 0; rank < RANKS; rank++) {
        un_group *g = &ranks[rank];
        g->rank = rank;
        g->ranks = RANKS;
        g->crowded = true; /* nobody spins or yields before he sleeps */
        g->spin.before_trial = g->messages.spin.before_trial = UINT32_MAX;
        g->segment.base = (char *)&segment;
        g->segment.header = (header *)&segment;
        g->segment.control_bytes = CONTROL_BYTES;
        g->segment.data_offset = offsetof(__typeof__(segment), data);
        g->segment.channel_offset = offsetof(__typeof__(segment), channels);
        g->segment.fifo_offset = offsetof(__typeof__(segment), fifos);
    }
}

static uint32_t load_lower_half(const void *word, bool is_private) {
    for (int rank = 0; rank < RANKS; rank++) is_private |= word == &control_of(&ranks[0], rank)->doorbell;
    return is_private ? atomic_load_explicit((_Atomic uint32_t *)word, memory_order_relaxed)
                      : (uint32_t)read_word(word);
}

/* Each rank in a thread of its own, to the end. */
static void run_ranks(void *(*body)(void *)) {
    pthread_t threads[RANKS];
    for (int rank = 0; rank < RANKS; rank++) pthread_create(&threads[rank], NULL, body, &ranks[rank]);
    for (int rank = 0; rank < RANKS; rank++) pthread_join(threads[rank], NULL);
}
