/* Before a library ends the process by abort(), as gloo does if sizes differ, another thread may tell
 * other hosts what the process has called. */
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "binding.h"

enum { MOMENT_NS = 5000000, MOST_MOMENTS = 300 };

static struct sigaction usual;
static atomic_int holder; /* the process that holds aborts; 0: none. A forked child does not. */
static atomic_bool aborting;

static void hold(int number) {
    const struct timespec moment = {.tv_nsec = MOMENT_NS};
    atomic_store(&aborting, true);
    for (int i = 0; i < MOST_MOMENTS && atomic_load(&holder) == getpid(); i++)
        nanosleep(&moment, NULL);
    sigaction(number, &usual, NULL);
    raise(number); /* blocked until we return */
}

/* hold_aborts(wanted): hold them from now on, for at most 1.5 s, or let them go */
PyObject *module_hold_aborts(PyObject *module, PyObject *wanted) {
    (void)module;
    struct sigaction held = {.sa_handler = hold}, now;
    sigaction(SIGABRT, NULL, &now);
    if (wanted == Py_True && now.sa_handler != hold) sigaction(SIGABRT, &held, &usual);
    atomic_store(&holder, wanted == Py_True ? getpid() : 0);
    Py_RETURN_NONE;
}

PyObject *module_is_aborting(PyObject *module, PyObject *ignored) {
    (void)module, (void)ignored;
    return PyBool_FromLong(atomic_load(&aborting));
}
