/* Letting go of the GIL while the engine waits. */
#include "binding.h"

/* Small calls that need not wait are over before another thread could use the GIL: it is given
 * away only when the engine blocks, and the thread's state is parked here meanwhile. */
void release_gil(void *parked) {
    PyThreadState **state = parked;
    if (!*state) *state = PyEval_SaveThread();
}

/* Look for Ctrl-C while the engine waits. */
int handle_signals(void *parked) {
    PyThreadState **state = parked;
    PyEval_RestoreThread(*state);
    int failed = PyErr_CheckSignals();
    *state = PyEval_SaveThread();
    return failed;
}
