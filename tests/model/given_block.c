// genmc: --disable-race-detection
/* The same where the memory lies in a block. */
#define BLOCK 1
#include "given_failed.c"
