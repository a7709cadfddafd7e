/* Rank 0 opens three records in a ring of two; another process reads the first as record_reader.py does.
 *
 * open_record: whoever finds the same number before and after reading has a whole record. */
#include "model.h"

#include "base/records.c"

static void *write_records(void *argument) {
    for (uint64_t number = 1; number <= 3; number++)
        assert(open_record(argument, 10 * number, 20 * number, 30 * number, NULL, ARRIVED) == number);
    return NULL;
}

static void *read_record(void *argument) {
    const record *r = &control_of(argument, 0)->records[1];
    uint64_t number = atomic_load_explicit(&r->number, memory_order_acquire);
    uint64_t call = read_word(&r->call), signature = read_word(&r->signature), bytes = read_word(&r->bytes);
    atomic_thread_fence(memory_order_acquire);
    if (!number || read_word(&r->number) != number) return NULL;
    assert(signature == 10 * number);
    assert(bytes == 20 * number);
    assert(call == 30 * number);
    return NULL;
}

int main(void) {
    open_ranks();
    pthread_t writes, reads;
    pthread_create(&writes, NULL, write_records, &ranks[0]);
    pthread_create(&reads, NULL, read_record, &ranks[1]);
    pthread_join(writes, NULL);
    pthread_join(reads, NULL);
    return 0;
}
