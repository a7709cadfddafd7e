// genmc: --check-liveness
/* The same with more bytes than the ring holds: the sender sleeps until there is room. */
#define BYTES 3
#include "ring_sleep.c"
