/* Loading UCX into a process that is not ours: no allocator patched, no signal handler installed.
 *
 * libucs reads its process-wide settings from the environment, once, when it is loaded. So it sees
 * an environment of ours for that moment. `environ` is replaced and not modified: a thread that
 * reads the environment meanwhile never sees a freed array.
 *
 * A process has one UCX. Its libraries find each other by name (libucs.so.0), and the loader takes
 * the one that is already loaded, of whatever version. So if another library (Open MPI, say) has
 * loaded a UCX, its libucp is the only one that fits; and a library that comes after us gets ours.
 *
 * RTLD_LOCAL hides UCX's names from others. RTLD_DEEPBIND would hide a UCX in the global scope from
 * us, but also a preloaded allocator: then strdup's memory would come from that one, and UCX would
 * free it with libc's. Address sanitizers refuse it too.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "network/ucx.h"

struct ucx ucx;

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static bool is_loaded;

/* Settings for the process while UCX is loaded, unless the user has set them. */
static const char *const settings[] = {
    "UCX_MEM_EVENTS=n",                  /* no hooks in malloc and mmap */
    "UCX_HANDLE_ERRORS=none",            /* no handlers of SIGSEGV and the like */
    "UCX_DEBUG_SIGNO=0",                 /* nor of SIGHUP, for its debugger */
    "UCX_VFS_ENABLE=n",                  /* no thread and no file system for its state */
    "UCX_MODULES=^cuda*,gdr*,rocm*,ze*", /* no GPU driver started: a child could not use it */
    "UCX_LOG_LEVEL=fatal",
};
enum { SETTINGS = sizeof settings / sizeof *settings };

static bool is_set(const char *setting) {
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(setting, "="), setting);
    return getenv(name) != NULL;
}

/* dlopen, in an environment with the settings and the folder of UCX's modules. */
static void *open_quietly(const char *path) {
    char modules[PATH_MAX + 32] = "UCX_MODULE_DIR=";
    const char *slash = strrchr(path, '/');
    if (slash) snprintf(modules + strlen(modules), PATH_MAX, "%.*s/ucx", (int)(slash - path), path);

    size_t count = 0;
    while (environ && environ[count]) count++;
    char **during = malloc((count + SETTINGS + 2) * sizeof *during);
    if (!during) return NULL;
    char **before = environ;
    if (count) memcpy(during, before, count * sizeof *during);
    for (int i = 0; i < SETTINGS; i++)
        if (!is_set(settings[i])) during[count++] = (char *)settings[i];
    if (slash && !is_set(modules)) during[count++] = modules;
    during[count] = NULL;

    environ = during;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    environ = before;
    free(during);
    return library;
}

/* The libucp next to a libucs that the process has already loaded, or NULL. */
static const char *path_beside_loaded(char path[PATH_MAX]) {
    void *libucs = dlopen("libucs.so.0", RTLD_LAZY | RTLD_NOLOAD);
    if (!libucs) return NULL;
    Dl_info where;
    void *symbol = dlsym(libucs, "ucs_status_string");
    const char *slash = NULL;
    if (symbol && dladdr(symbol, &where)) slash = strrchr(where.dli_fname, '/');
    if (slash)
        snprintf(path, PATH_MAX, "%.*s/libucp.so.0", (int)(slash - where.dli_fname),
                 where.dli_fname);
    dlclose(libucs);
    return slash ? path : NULL;
}

#define FUNCTION(name) {"ucp_" #name, offsetof(struct ucx, name)}
static const struct {
    const char *name;
    size_t offset;
} functions[] = {
    FUNCTION(get_version),
    FUNCTION(config_read),
    FUNCTION(config_modify),
    FUNCTION(config_release),
    FUNCTION(init_version),
    FUNCTION(cleanup),
    FUNCTION(worker_create),
    FUNCTION(worker_destroy),
    FUNCTION(worker_get_address),
    FUNCTION(worker_release_address),
    FUNCTION(worker_get_efd),
    FUNCTION(worker_arm),
    FUNCTION(worker_progress),
    FUNCTION(worker_signal),
    FUNCTION(worker_set_am_recv_handler),
    FUNCTION(ep_create),
    FUNCTION(ep_close_nbx),
    FUNCTION(am_send_nbx),
    FUNCTION(am_recv_data_nbx),
    FUNCTION(am_data_release),
    FUNCTION(request_check_status),
    FUNCTION(request_free),
    {"ucs_status_string", offsetof(struct ucx, status_string)},
};

static bool fill_table(void *library) {
    struct ucx table;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *function = dlsym(library, functions[i].name);
        if (!function) return false;
        memcpy((char *)&table + functions[i].offset, &function, sizeof function);
    }
    ucx = table;
    return true;
}

const char *load_ucx(const char *path) {
    static char why[512];
    char real[PATH_MAX], beside[PATH_MAX];
    pthread_mutex_lock(&loading);
    if (!is_loaded) {
        const char *chosen = path_beside_loaded(beside);
        if (!chosen) chosen = strchr(path, '/') && realpath(path, real) ? real : path;
        void *library = open_quietly(chosen);
        is_loaded = library && fill_table(library);
        if (!is_loaded) {
            const char *error = dlerror();
            snprintf(why, sizeof why, "%s", error ? error : "out of memory");
        }
    }
    const char *result = is_loaded ? NULL : why;
    pthread_mutex_unlock(&loading);
    return result;
}
