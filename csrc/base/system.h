/* What the engine asks of the system, and what knows nothing of groups: the clock, futexes,
 * threads, forks. */
#ifndef UNISONO_SYSTEM_H
#define UNISONO_SYSTEM_H

#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define COLD __attribute__((cold)) /* for failures: kept out of the hot path */

int64_t clock_ns(void);
void sleep_ns(int64_t ns);

/* Sleep while a word is `seen`, for at most `ns`; wake up to so many sleepers. Words of the
 * segment are shared by the ranks, others by this process. Cold, so that calls without sleepers
 * run straight on. */
enum whose { OF_RANKS, OF_PROCESS };
COLD void sleep_on(const void *word, enum whose whose, uint32_t seen, int64_t ns);
COLD void wake(const void *word, enum whose whose, int most);

/* Start a thread that leaves all signals to the program's own. Tools show its name: 15 letters. */
bool start_thread(pthread_t *thread, const char *name, void *(*body)(void *), void *argument);

/* How many forks are above this process, once they are counted: so a child that still holds its
 * parent's group is detected without a system call. */
void count_forks(void);
unsigned current_process(void);

static inline void relax_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

#endif
