/* Memory that all ranks map. */
#ifndef UNISONO_BLOCKS_H
#define UNISONO_BLOCKS_H

#include "base/group.h"

typedef struct place { /* of bytes in a rank's own part of a block */
    uint64_t block, offset;
} place;
static const uint64_t NO_BLOCK = UINT64_MAX; /* the offset is an address in the rank's own memory */
bool find_place(un_group *g, const char *data, size_t bytes, place *found);
void begin_reading(un_group *g); /* until end_reading every block stays mapped */
char *address_of(un_group *g, int rank, place where, size_t bytes); /* NULL: no such memory */
void end_reading(un_group *g);
void leave_blocks(un_group *g); /* the group closes */

#endif
