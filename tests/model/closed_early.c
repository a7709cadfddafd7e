/* The same where rank 1 waits for a step that never comes. Its wake-up is a courtesy, which it may sleep
 * through: then it looks around once its slice is over. */
#define AWAITED_TURN 2
#define SLICES 1
#include "closed.c"
