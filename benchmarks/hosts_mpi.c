/* Collectives and messages of Open MPI, timed as benchmarks/hosts.py does; hosts_mpi.py starts it.
 *
 * hosts_mpi MATE CALL BYTES ROUNDS CALLS [CALL BYTES ROUNDS CALLS ...]: for each, the median over
 * the rounds of the slowest rank's time for one of so many calls, in ms, on a line. MATE is the rank
 * that rank 0 sends messages to.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, ranks, mate;
static float *given, *result;

static void call(const char *name, int count, int root) {
    MPI_Comm world = MPI_COMM_WORLD;
    int part = count / ranks ? count / ranks : 1;
    if (!strcmp(name, "all_reduce")) {
        MPI_Allreduce(MPI_IN_PLACE, given, count, MPI_FLOAT, MPI_SUM, world);
    } else if (!strcmp(name, "broadcast")) {
        MPI_Bcast(given, count, MPI_FLOAT, root, world);
    } else if (!strcmp(name, "all_gather")) {
        MPI_Allgather(given, part, MPI_FLOAT, result, part, MPI_FLOAT, world);
    } else if (!strcmp(name, "reduce_scatter")) {
        MPI_Reduce_scatter_block(given, result, part, MPI_FLOAT, MPI_SUM, world);
    } else if (!strcmp(name, "all_to_all")) {
        MPI_Alltoall(given, part, MPI_FLOAT, result, part, MPI_FLOAT, world);
    } else if (!strcmp(name, "reduce")) {
        MPI_Reduce(rank == root ? MPI_IN_PLACE : given, given, count, MPI_FLOAT, MPI_SUM, root, world);
    } else if (!strcmp(name, "gather")) {
        MPI_Gather(given, part, MPI_FLOAT, result, part, MPI_FLOAT, root, world);
    } else if (!strcmp(name, "scatter")) {
        MPI_Scatter(given, part, MPI_FLOAT, result, part, MPI_FLOAT, root, world);
    } else if (!strcmp(name, "barrier")) {
        MPI_Barrier(world);
    } else if (rank == 0) {
        MPI_Send(given, count, MPI_FLOAT, mate, 0, world);
        MPI_Recv(given, count, MPI_FLOAT, mate, 0, world, MPI_STATUS_IGNORE);
    } else if (rank == mate) {
        MPI_Recv(given, count, MPI_FLOAT, 0, 0, world, MPI_STATUS_IGNORE);
        MPI_Send(given, count, MPI_FLOAT, 0, 0, world);
    }
}

static int compare(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static double measure(const char *name, int count, int rounds, int calls) {
    double *seconds = malloc(rounds * sizeof *seconds);
    for (int i = 0; i < 2; i++) call(name, count, 0);
    for (int round = 0; round < rounds; round++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double began = MPI_Wtime();
        for (int i = 0; i < calls; i++) call(name, count, i % 2 ? mate : 0);
        seconds[round] = (MPI_Wtime() - began) / calls;
    }
    MPI_Allreduce(MPI_IN_PLACE, seconds, rounds, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    qsort(seconds, rounds, sizeof *seconds, compare);
    double median = (seconds[(rounds - 1) / 2] + seconds[rounds / 2]) / 2;
    free(seconds);
    return median;
}

int main(int arguments, char **argument) {
    MPI_Init(&arguments, &argument);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    mate = atoi(argument[1]);
    for (int i = 2; i + 3 < arguments; i += 4) {
        long bytes = atol(argument[i + 1]);
        int count = bytes / sizeof(float) ? bytes / sizeof(float) : 1;
        given = calloc(count + ranks, sizeof *given);
        result = calloc(count + ranks, sizeof *result);
        int rounds = atoi(argument[i + 2]), calls = atoi(argument[i + 3]);
        double seconds = measure(argument[i], count, rounds, calls);
        if (rank == 0) printf("%s %ld %.6f\n", argument[i], bytes, 1000 * seconds);
        fflush(stdout);
        free(given);
        free(result);
    }
    MPI_Finalize();
    return 0;
}
