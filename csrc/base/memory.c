/* What the machine and the cgroup leave: bytes of memory and a share of the cores. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>

#include "base/segment.h"

/* Read "number" or "number number" from a file; how many there were. "max" counts as none. */
static int read_numbers(const char *path, int64_t *first, int64_t *second) {
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    int found = fscanf(file, "%" SCNd64 " %" SCNd64, first, second);
    fclose(file);
    return found < 0 ? 0 : found;
}

/* The value of `key` in a file of lines "key value" or "key: value", or 0. */
static int64_t read_key(const char *path, const char *key) {
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    char name[64];
    int64_t value, found = 0;
    while (fscanf(file, "%63s %" SCNd64 "%*[^\n]", name, &value) == 2)
        if (!strcmp(name, key)) found = value;
    fclose(file);
    return found;
}

/* The path of this process's cgroup below its mount, for a version 1 controller or version 2. */
static bool cgroup_path(const char *controller, char path[PATH_MAX]) {
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (!file) return false;
    char line[PATH_MAX + 256];
    bool found = false;
    while (!found && fgets(line, sizeof line, file)) {
        char *names = strchr(line, ':');
        char *where = names ? strchr(names + 1, ':') : NULL;
        if (!where) continue;
        *where++ = 0;
        where[strcspn(where, "\n")] = 0;
        found = controller ? !strcmp(names + 1, controller) : names[1] == 0;
        if (found) snprintf(path, PATH_MAX, "%s", where);
    }
    fclose(file);
    return found;
}

/* Call `look` on the cgroup's folder and on each of its ancestors up to the mount. */
static void for_each_ancestor(const char *mount, char path[PATH_MAX],
                              void (*look)(const char *folder, void *argument), void *argument) {
    char folder[2 * PATH_MAX];
    for (;;) {
        snprintf(folder, sizeof folder, "%s%s", mount, path);
        look(folder, argument);
        char *last = strrchr(path, '/');
        if (!last || !*path) return;
        *last = 0;
    }
}

static int64_t folder_number(const char *folder, const char *name, int64_t *second) {
    char path[2 * PATH_MAX + 64];
    int64_t first = -1, ignored;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return read_numbers(path, &first, second ? second : &ignored) ? first : -1;
}

/* Room below one limit: file cache that the kernel would reclaim does not count as used. */
static void look_at_memory(const char *folder, void *argument) {
    int64_t *room = argument;
    int64_t limit = folder_number(folder, "memory.max", NULL);
    int64_t used = folder_number(folder, "memory.current", NULL);
    if (limit < 0) {
        limit = folder_number(folder, "memory.limit_in_bytes", NULL);
        used = folder_number(folder, "memory.usage_in_bytes", NULL);
    }
    if (limit < 0 || used < 0) return;
    char path[2 * PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    int64_t left = limit - used + read_key(path, "inactive_file");
    if (left < *room) *room = left;
}

static void look_at_quota(const char *folder, void *argument) {
    int *cores = argument;
    int64_t period = 0, quota = folder_number(folder, "cpu.max", &period);
    if (quota < 0) {
        quota = folder_number(folder, "cpu.cfs_quota_us", NULL);
        period = folder_number(folder, "cpu.cfs_period_us", NULL);
    }
    if (quota <= 0 || period <= 0) return;
    int whole = (int)((quota + period - 1) / period);
    if (whole < *cores) *cores = whole;
}

int64_t un_memory_room(void) {
    char path[PATH_MAX];
    int64_t room = read_key("/proc/meminfo", "MemAvailable:") * 1024;
    if (!room) room = INT64_MAX;
    if (cgroup_path(NULL, path)) for_each_ancestor("/sys/fs/cgroup", path, look_at_memory, &room);
    if (cgroup_path("memory", path))
        for_each_ancestor("/sys/fs/cgroup/memory", path, look_at_memory, &room);
    return room;
}

int un_cpu_quota(void) {
    char path[PATH_MAX];
    int cores = INT_MAX;
    if (cgroup_path(NULL, path)) for_each_ancestor("/sys/fs/cgroup", path, look_at_quota, &cores);
    if (cgroup_path("cpu,cpuacct", path) || cgroup_path("cpu", path))
        for_each_ancestor("/sys/fs/cgroup/cpu", path, look_at_quota, &cores);
    return cores;
}
