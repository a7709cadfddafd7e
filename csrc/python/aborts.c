/* Before a library ends the process by abort(), as gloo does if sizes differ, another thread may tell
 * other hosts what the process has called. */
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "binding.h"

enum { MOMENT_NS = 5000000, MOST_NS = 2000000000 };

static struct sigaction usual;
static atomic_int holder; /* the process whose aborts are held, not a forked child; 0: none */
static atomic_bool aborting;

static void hold(int number) {
    aborting = true;
    for (uint64_t end = un_now().ns + MOST_NS; un_now().ns < end && holder == getpid();)
        nanosleep(&(struct timespec){.tv_nsec = MOMENT_NS}, NULL);
    sigaction(number, &usual, NULL);
    raise(number); /* blocked until we return */
}

/* hold_aborts(wanted): hold them from now on, or let them go; None: neither. Returns whether the
 * process is aborting. */
PyObject *module_hold_aborts(PyObject *module, PyObject *wanted) {
    (void)module;
    struct sigaction held = {.sa_handler = hold}, now;
    if (wanted == Py_True && !sigaction(SIGABRT, NULL, &now) && now.sa_handler != hold)
        sigaction(SIGABRT, &held, &usual);
    if (wanted != Py_None) holder = wanted == Py_True ? getpid() : 0;
    return PyBool_FromLong(aborting);
}
