/* The engine's latency inside C, so that Python's share of a call is visible.
 *
 * native_latency [ranks] [largest_bytes] [operation]: all_reduce of float32, or broadcast or
 * all_gather of as many bytes on each rank, from 8 bytes on, and a barrier; prints
 * "ranks bytes median_ns least_ns" lines (bytes 0: the barrier), over batches, of the time of one
 * call. With one rank a line shows what planning, posting and copying cost alone.
 *
 * native_latency records: what the record of one call takes, in ns.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "unisono.h"

enum { BATCHES = 41 };

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void check(un_status status) {
    if (!status) return;
    fprintf(stderr, "native_latency: the engine answered %d\n", (int)status);
    exit(1);
}

/* Rank 0 prints it. */
static void time_calls(un_group *group, int rank, int ranks, const un_call *call, int calls) {
    un_call barrier = {.operation = UN_BARRIER, .timeout_ns = call->timeout_ns};
    double each_ns[BATCHES];
    for (int batch = 0; batch < BATCHES; batch++) {
        check(un_run(group, &barrier));
        int64_t start = now_ns();
        for (int i = 0; i < calls; i++) check(un_run(group, call));
        each_ns[batch] = (double)(now_ns() - start) / calls;
    }
    qsort(each_ns, BATCHES, sizeof *each_ns, ascending);
    size_t bytes = call->input ? call->input->bytes : 0;
    if (!rank) printf("%d %zu %.0f %.0f\n", ranks, bytes, each_ns[BATCHES / 2], each_ns[0]);
}

static void measure(int descriptor, int rank, int ranks, size_t largest, un_operation operation) {
    un_group *group;
    check(un_group_open(descriptor, rank, ranks, 1, &group));
    int parts = operation == UN_ALL_GATHER ? ranks : 1;
    char *data = calloc(1, largest), *wide = parts > 1 ? calloc((size_t)parts, largest) : data;
    un_view views[UN_MAX_RANKS];
    un_stream outputs[UN_MAX_RANKS];
    un_call call = {.operation = UN_BARRIER, .timeout_ns = 60 * (int64_t)1000000000};
    time_calls(group, rank, ranks, &call, 2000);
    for (size_t bytes = 8; bytes <= largest; bytes *= bytes < 64 ? 8 : 4) {
        un_view view = {.data = data, .bytes = bytes};
        un_stream stream = {.views = &view, .count = 1, .bytes = bytes};
        for (int part = 0; part < parts; part++) {
            views[part] = (un_view){.data = wide + (size_t)part * bytes, .bytes = bytes};
            outputs[part] = (un_stream){.views = &views[part], .count = 1, .bytes = bytes};
        }
        call = (un_call){.operation = operation,
                         .dtype = un_dtype_of(UN_FLOAT, 32, 1),
                         .factor = 1,
                         .input = &stream,
                         .output = outputs,
                         .timeout_ns = call.timeout_ns};
        time_calls(group, rank, ranks, &call, bytes < 65536 ? 1000 : bytes < 1 << 22 ? 50 : 2);
    }
    if (wide != data) free(wide);
    free(data);
    un_group_close(group);
}

static int measure_records(void) {
    enum { CALLS = 100000 };
    un_group *group;
    check(un_group_open(un_segment_create(1, 1, 1), 0, 1, 1, &group));
    un_call call = {.operation = UN_ALL_REDUCE, .dtype = un_dtype_of(UN_FLOAT, 32, 1)};
    double each_ns[BATCHES];
    for (int batch = 0; batch < BATCHES; batch++) {
        int64_t start = now_ns();
        for (uint64_t i = 1; i <= CALLS; i++)
            un_record_end(group, un_record_open(group, &call, 8, i), UN_OK);
        each_ns[batch] = (double)(now_ns() - start) / CALLS;
    }
    qsort(each_ns, BATCHES, sizeof *each_ns, ascending);
    printf("%.1f\n", each_ns[BATCHES / 2]);
    un_group_close(group);
    return 0;
}

int main(int count, char **arguments) {
    if (count > 1 && !strcmp(arguments[1], "records")) return measure_records();
    int ranks = count > 1 ? atoi(arguments[1]) : 2;
    size_t largest = count > 2 ? strtoull(arguments[2], NULL, 10) : 1 << 26;
    const char *name = count > 3 ? arguments[3] : "all_reduce";
    un_operation operation = !strcmp(name, "broadcast")    ? UN_BROADCAST
                             : !strcmp(name, "all_gather") ? UN_ALL_GATHER
                                                           : UN_ALL_REDUCE;
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    int descriptor = un_segment_create(ranks, CPU_COUNT(&set), 1);
    if (descriptor < 0) {
        perror("native_latency");
        return 1;
    }
    int rank = 0;
    for (int child = 1; child < ranks && !rank; child++)
        if (!fork()) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            rank = child;
        }
    measure(descriptor, rank, ranks, largest, operation);
    if (rank) return 0;
    int status, failed = 0;
    while (wait(&status) > 0) failed |= status;
    return failed != 0;
}
