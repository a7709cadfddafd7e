/* Letters: messages with their memory, whose content follows from sender, tag and place. */
#ifndef UNISONO_LETTERS_H
#define UNISONO_LETTERS_H

#include "threads.h"

typedef struct letter {
    un_message message;
    side side;
    uint64_t number; /* among those of the same sender and tag, where that matters */
} letter;

/* From `me` to `peer`, or the other way round; items have 8 bytes. */
void write_letter(letter *l, int from);
void prepare_letter(letter *l, bool sends, int me, int peer, int64_t tag, size_t items,
                    enum shape shape);
void start_letter(letter *l, un_group *group);
void await_letter(letter *l, un_group *group); /* succeeds, and the letter is freed */
void finish_letter(letter *l);                 /* the same for one that is done */

#endif
