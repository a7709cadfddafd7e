#define _GNU_SOURCE
#include "base/system.h"

#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

void sleep_ns(int64_t ns) {
    nanosleep(&(struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000}, NULL);
}

/* The futex word is the lower half of a flag: both architectures are little-endian. */
static void futex(const void *word, enum whose whose, int operation, uint32_t value,
                  const struct timespec *most) {
    int flag = whose == OF_PROCESS ? FUTEX_PRIVATE_FLAG : 0;
    syscall(SYS_futex, word, operation | flag, value, most, NULL, 0);
}

void sleep_on(const void *word, enum whose whose, uint32_t seen, int64_t ns) {
    struct timespec slice = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    futex(word, whose, FUTEX_WAIT, seen, &slice);
}

void wake(const void *word, enum whose whose, int most) {
    futex(word, whose, FUTEX_WAKE, (uint32_t)most, NULL);
}

bool start_thread(pthread_t *thread, const char *name, void *(*body)(void *), void *argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = !pthread_create(thread, NULL, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started) pthread_setname_np(*thread, name);
    return started;
}

static _Atomic unsigned forks;

static void count_fork(void) { atomic_fetch_add(&forks, 1); }
static void begin_counting(void) { pthread_atfork(NULL, NULL, count_fork); }

void count_forks(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, begin_counting);
}

unsigned current_process(void) { return atomic_load(&forks); }
