// genmc: --disable-race-detection
/* Rank 0 leaves a note and another one in its place; rank 1 reads meanwhile, and knows that it may have
 * read parts of both.
 *
 * un_group_write_note, write_note, un_group_read_note: a note that was read is the one that was asked
 * for. The copy of its text races, and may: what it brought is thrown away then. */
#include "model.h"

#include "base/records.c"

bool group_is_inherited(const un_group *g) { return false; }

static void *write_notes(void *argument) {
    un_group_write_note(argument, UN_ANSWER, 1, "a");
    un_group_write_note(argument, UN_ANSWER, 2, "b");
    return NULL;
}

static void *read_note(void *argument) {
    char text[UN_TEXT_BYTES];
    if (un_group_read_note(argument, 0, UN_ANSWER, 1, text)) assert(text[0] == 'a');
    if (un_group_read_note(argument, 0, UN_ANSWER, 2, text)) assert(text[0] == 'b');
    return NULL;
}

int main(void) {
    open_ranks();
    pthread_t writes, reads;
    pthread_create(&writes, NULL, write_notes, &ranks[0]);
    pthread_create(&reads, NULL, read_note, &ranks[1]);
    pthread_join(writes, NULL);
    pthread_join(reads, NULL);
    return 0;
}
