/* The same where rank 0 opens the block again after it has released it: it has its memory, or none.
 *
 * un_block_reopen, take_back_release. */
#define REOPENS
#include "blocks_released.c"
