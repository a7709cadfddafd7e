/* ucx_load LIBUCP [LIBUCS]: load UCX, with a worker, and print what that has changed in the process.
 * With LIBUCS, that library of another UCX is loaded before.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "network/ucx.h"

enum { SIGNALS = 65, BYTES = 32 };
static const char *const functions[] = {"mmap",  "munmap", "mremap", "brk",     "sbrk",
                                        "shmat", "shmdt",  "malloc", "realloc", "free",
                                        "madvise"};
enum { FUNCTIONS = sizeof functions / sizeof *functions };

typedef struct state {
    void (*handlers[SIGNALS])(int);
    unsigned char code[FUNCTIONS][BYTES];
    char **environment;
} state;

static void look(state *now) {
    memset(now, 0, sizeof *now);
    for (int number = 1; number < SIGNALS; number++) {
        struct sigaction action;
        if (!sigaction(number, NULL, &action)) now->handlers[number] = action.sa_handler;
    }
    for (int i = 0; i < FUNCTIONS; i++)
        memcpy(now->code[i], dlsym(RTLD_DEFAULT, functions[i]), BYTES);
    now->environment = environ;
}

static bool succeeds(const char *what, ucs_status_t status) {
    if (status != UCS_OK) printf("%s: %s\n", what, ucx.status_string(status));
    return status == UCS_OK;
}

static bool make_worker(void) {
    ucp_config_t *config;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                           .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    ucp_worker_params_t of_worker = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                     .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    return succeeds("config", ucx.config_read(NULL, NULL, &config)) &&
           succeeds("modify", ucx.config_modify(config, "TLS", "tcp,self")) &&
           succeeds("init", ucx.init_version(UCX_API_MAJOR, UCX_API_MINOR, &params, config,
                                             &context)) &&
           succeeds("worker", ucx.worker_create(context, &of_worker, &worker));
}

int main(int count, char **arguments) {
    static state before, after;
    if (count > 2 && !dlopen(arguments[2], RTLD_NOW | RTLD_LOCAL)) return 2;
    look(&before);
    const char *problem = load_ucx(arguments[1]);
    if (problem) {
        printf("problem: %s\n", problem);
        return 1;
    }
    if (!make_worker()) return 1;
    look(&after);
    for (int number = 1; number < SIGNALS; number++)
        if (before.handlers[number] != after.handlers[number])
            printf("handles signal %d\n", number);
    for (int i = 0; i < FUNCTIONS; i++)
        if (memcmp(before.code[i], after.code[i], BYTES)) printf("patched %s\n", functions[i]);
    if (before.environment != after.environment || getenv("UCX_MEM_EVENTS"))
        printf("changed the environment\n");
    unsigned major, minor, release;
    ucx.get_version(&major, &minor, &release);
    Dl_info where;
    dladdr((void *)ucx.get_version, &where);
    printf("UCX %u.%u.%u in %s\n", major, minor, release, where.dli_fname);
    return 0;
}
