/* What the files of this program share: ranks as threads, and what is expected of them. */
#ifndef UNISONO_THREADS_H
#define UNISONO_THREADS_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "unisono.h"

enum { MOST_RANKS = 8 };

#define SECOND_NS ((int64_t)1000000000)
#define MILLISECOND_NS ((int64_t)1000000)

/* -- threads.c: ranks ------------------------------------------------------------------------ */

/* A rank's membership in a group, given to its thread. */
typedef struct membership {
    un_group *group; /* closed at the end, unless the body has set it to NULL */
    int rank;
    int ranks;
    void *shared;
} membership;

/* Run `body` on every rank of a new group, each in a thread of its own. A group of more ranks than
 * `cores` gives them away while it waits; one with two cores per rank has room for workers. */
void run_ranks(int ranks, int cores, void (*body)(membership *), void *shared);

/* All memberships of a new group, for bodies that need several groups. */
void open_groups(int ranks, int cores, un_group **groups);

pthread_t start(void *(*body)(void *), void *argument);
void join(pthread_t thread);
void sleep_ms(int milliseconds);
uint64_t scramble(uint64_t value); /* a number to numbers that look random */

/* A wrong result ends the program: what would follow from it tells nothing. */
void wrong(const char *file, int line, const char *what, long seen, long wanted);
#define EXPECT(CONDITION) \
    ((CONDITION) ? (void)0 : wrong(__FILE__, __LINE__, #CONDITION, 0, 1))
#define EXPECT_EQUAL(EXPRESSION, WANTED) \
    expect_equal(__FILE__, __LINE__, #EXPRESSION, (long)(EXPRESSION), (long)(WANTED))
void expect_equal(const char *file, int line, const char *what, long seen, long wanted);

/* -- numbers.c: element types, and arithmetic by another way than the engine's ----------------- */

enum { TYPES = 16, INT64 = 3, FLOAT32 = 10, COMPLEX128 = 13, OPAQUE = 15 };

typedef struct number { /* wraps around; the imaginary part is 0 but for complex types */
    uint64_t re, im;
} number;

un_dtype dtype_of(int type);
size_t item_bytes_of(int type);
double factor_for(int type);

/* A number that the type holds, small enough that `ranks` of them combine without rounding. */
number choose_number(int type, un_reduction reduction, int ranks, uint64_t random);
number reduce_numbers(int type, un_reduction reduction, const number *given, int ranks);
void encode(int type, number n, char *item);

/* -- scenarios.c: one collective with its memory and its expectation -------------------------- */

enum shape { CONTIGUOUS, ROWS, STRIDED, PIECES, SHAPES };

/* Memory of which scenarios of this thread take theirs. */
typedef struct arena {
    char *memory;
    size_t bytes, used;
} arena;
extern _Thread_local arena *scenario_memory;

typedef struct scenario {
    un_operation operation;
    un_reduction reduction;
    int type;
    int root;
    size_t items;
    bool uneven;
    bool in_place; /* where input and output may be one */
    enum shape shape;
    uint64_t seed; /* of the numbers */
} scenario;

/* Memory in one of the shapes, cut into parts. */
typedef struct side {
    char *memory;
    size_t memory_bytes;
    size_t item_bytes, columns, column_bytes, row_bytes;
    int parts;
    size_t first[MOST_RANKS + 1]; /* the item with which each part starts */
    un_layout *layout;
    un_view *views;
    un_stream streams[MOST_RANKS];
} side;

void make_side(side *s, enum shape shape, size_t item_bytes, int parts, const size_t *items);
char *item_at(const side *s, size_t item);
bool side_is_untouched(const side *s);
void free_side(side *s);

typedef struct trial {
    scenario scenario;
    int rank, ranks;
    side input, output;
    un_call call;
} trial;

void prepare_trial(trial *t, const scenario *c, int rank, int ranks);
void check_trial(trial *t); /* after it has succeeded */
void free_trial(trial *t);
scenario random_scenario(uint64_t random, int ranks, size_t most_items);
void run_scenario(const membership *me, const scenario *c);
void run_random_scenario(const membership *me, uint64_t random, size_t most_items);
un_call sum_of(const un_stream *stream); /* of float32, in place */
un_call barrier(void);

/* -- the tests --------------------------------------------------------------------------------- */

void test_collectives(void);
void test_types(void);
void test_many_groups(void);
void test_schedules(void);
void test_works(void);
void test_ragged(void);
void test_messages(void);
void test_message_failures(void);
void test_damage(void);
void test_call_failures(void);
void test_sleepers(void);
void test_processes(void);
void test_processors(void);
void test_blocks(void);

#endif
