/* Messages with their memory, whose content follows from sender, tag and position. */
#ifndef UNISONO_CHECKED_MESSAGES_H
#define UNISONO_CHECKED_MESSAGES_H

#include "threads.h"

typedef struct checked_message {
    un_message message;
    side side;
    uint64_t number; /* among those of the same sender and tag, where that matters */
} checked_message;

/* From `me` to `peer`, or the other way round; items have 8 bytes. */
void fill_message(checked_message *m, int from);
void prepare_message(checked_message *m, bool sends, int me, int peer, int64_t tag, size_t items,
                     enum shape shape);
void start_message(checked_message *m, un_group *group);
void await_message(checked_message *m, un_group *group); /* succeeds, and the message is freed */
void finish_message(checked_message *m);                 /* the same for one that is done */

#endif
