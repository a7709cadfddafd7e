/* What the files of the Python module share: the Group, and how a call leaves Python.
 *
 * binding             the module and its Group
 * aborts              a moment for last words before abort() ends the process
 * layouts, tensors    where elements lie; from tensors to streams
 * torch_tensors       what only torch knows about a tensor
 * overlaps            tensors that share memory
 * calls               blocking calls, and releasing the GIL
 * given               blocking calls as torch.distributed describes them
 * works, messages     asynchronous operations; pending: what the two have in common
 * blocks              memory that all ranks of a group map
 * shapes              types and shapes of tensors, and their exchange between ranks
 * recorded_calls      calls that another library performs
 * networks            UCX, and groups over several hosts
 * operators           groups for torch's operators (torch_ops/)
 * sites               where in the caller's program a call was made
 */
#ifndef UNISONO_BINDING_H
#define UNISONO_BINDING_H

#include "tensors.h"

enum { SMALL_BYTES = 8192 }; /* the most that is moved without releasing the GIL */

enum extra_status {
    ASK_AGAIN = 100, /* the fast path does not apply; no peer has seen the call */
    ON_DEVICE = 101, /* the same: its tensors are on a GPU */
};

typedef struct Group {
    PyObject_HEAD
    un_group *group; /* NULL once closed */
    int ranks;
    int rank;
    int users; /* calls under way, counted under the GIL */
    bool closing;
    bool keeps_sites;     /* of blocking calls too */
    char is_reproducible; /* reductions that do not say otherwise */
    int64_t timeout_ns;
    struct Pending *pending;   /* works and messages under way, */
    struct Pending *next_look; /* and the next one to check; NULL: the first */
    PyObject *name;
} Group;

/* The arguments of a collective from Python, and what the engine gets for them. Parsed in one
 * function for run and submit, and passed by pointer. */
typedef struct call_arguments {
    un_call call;
    PyObject *output, *input; /* the caller's, as is */
    PyObject *schedule_bytes; /* the integers of a compiled schedule, or None */
    PyObject *residual;       /* of a wire format, or None */
    bool coalesced;
    bool in_place; /* the input is also the output */
    un_compiled_schedule schedule;
    side in, out; /* of read_tensors */
} call_arguments;

static inline unsigned default_form(const Group *self) {
    return self->is_reproducible ? UN_REPRODUCIBLE : 0;
}

/* What works and messages have in common: to the program both are a Work. */
typedef struct Pending {
    PyObject_HEAD
    PyObject *weak_references;
    bool is_message;
    struct Pending *previous, *next; /* of those that the group keeps alive */
    bool is_kept;                    /* it does */
    Group *group;
    PyObject *exceptions; /* makes an exception from a status */
    PyObject *kept;       /* alive: tensors, and a schedule; NULL once it is done */
} Pending;

typedef struct Work {
    Pending pending;
    un_work work;
    call_arguments arguments;
} Work;

typedef struct Message {
    Pending pending;
    un_message message;
    tensor tensor;
    un_view view;
} Message;

/* calls.c */
void release_gil(void *parked);
int handle_signals(void *parked);

/* What the engine calls while it waits; a timeout of 0 is the group's. */
static inline un_call hooks_for(PyThreadState **parked, int64_t timeout_ns) {
    return (un_call){.timeout_ns = timeout_ns,
                     .block = release_gil,
                     .pause = handle_signals,
                     .argument = parked};
}

void write_site_note(un_group *group, uint64_t about);
PyObject *status_of(int read); /* the status for the result of reading arguments */
int enter_engine(Group *self, un_status (*body)(un_group *, const un_call *), un_call *call,
                 bool small);
int parse_call(call_arguments *a, const Group *self, PyObject *const *arguments, Py_ssize_t count);
int read_tensors(call_arguments *a, Group *self);
void free_tensors(call_arguments *a);
PyObject *run_call(call_arguments *a, Group *self);
PyObject *group_all_reduce(PyObject *object, PyObject *const *arguments, Py_ssize_t count);
PyObject *group_run(PyObject *object, PyObject *const *arguments, Py_ssize_t count);
PyObject *group_barrier(PyObject *object, PyObject *ignored);
PyObject *group_refuse(PyObject *object, PyObject *operation);
int prepare_calls(void);

/* forms.c */
PyObject *module_form(PyObject *module, PyObject *arguments);

/* given.c */
PyObject *module_know_torch(PyObject *module, PyObject *arguments);
int given_reduction(PyObject *options);
int given_root(PyObject *options);
int prepare_given(void);
PyObject *group_run_given(PyObject *object, PyObject *const *arguments, Py_ssize_t count);

static inline bool is_list(PyObject *object) {
    return PyList_Check(object) || PyTuple_Check(object);
}

/* overlaps.c */
/* Whether the tensors of a call share memory as allowed: 0, REFUSED with the first two that do
 * not, or -1 (exception). */
int check_overlaps(const call_arguments *a, size_t rank, size_t ranks, extent found[2]);

/* find_clash(operation, output, input, rank, ranks, coalesced): the first two that share memory, each
 * (whether it is an input, its index), or None; each side is a tensor or a list; if the input is
 * None, the output is a list. */
PyObject *module_find_clash(PyObject *module, PyObject *arguments);
PyObject *module_overlaps_itself(PyObject *module, PyObject *tensor);

/* shapes.c */
enum { DTYPE, DIMS, LENGTHS }; /* a tensor in integers: type, number of dimensions, their lengths */

bool look_at(PyObject *object, dl_tensor *d); /* false: DLPack cannot export it */
void describe(int64_t *to, const dl_tensor *d, size_t most_dims); /* at most so many lengths */
PyObject *as_tuple(const int64_t *integers, size_t count);
PyObject *ranks_in(const Group *self, const bool *chosen); /* as a tuple */

/* Rows of so many bytes each, as streams: one for each rank. Free with PyMem_Free. */
un_stream *streams_of_rows(const Group *self, char *rows, size_t bytes);

/* The integers of all ranks, the same number from each; a timeout of 0 is the group's. A status, or
 * -1 with an exception. */
int gather_integers(Group *self, const int64_t *mine, size_t count, int64_t *rows,
                    int64_t timeout_ns);
bool measure(PyObject *object, un_dtype *dtype, uint64_t *bytes);
PyObject *module_describe_shapes(PyObject *module, PyObject *list);
PyObject *group_exchange(PyObject *object, PyObject *const *arguments, Py_ssize_t passed);

/* ragged.c */
PyObject *group_gather_ragged(PyObject *object, PyObject *const *arguments, Py_ssize_t count);

/* blocks.c */
PyObject *module_create_block(PyObject *module, PyObject *sizes);
PyObject *module_pack_changes(PyObject *module, PyObject *arguments);
PyObject *module_apply_changes(PyObject *module, PyObject *arguments);
PyObject *module_share_pages(PyObject *module, PyObject *arguments);
PyObject *module_protect_pages(PyObject *module, PyObject *arguments);
PyObject *group_open_block(PyObject *object, PyObject *arguments);
PyObject *group_reopen_block(PyObject *object, PyObject *number);
int prepare_blocks(void);

/* recorded_calls.c */
PyObject *group_record_open(PyObject *object, PyObject *const *arguments, Py_ssize_t count);
PyObject *group_record_given(PyObject *object, PyObject *const *arguments, Py_ssize_t count);
PyObject *group_record_cover(PyObject *object, PyObject *whether);
PyObject *group_record_end(PyObject *object, PyObject *const *arguments, Py_ssize_t count);
PyObject *group_check(PyObject *object, PyObject *const *arguments, Py_ssize_t count);

/* aborts.c */
PyObject *module_hold_aborts(PyObject *module, PyObject *wanted);

/* networks.c */
PyObject *module_load_ucx(PyObject *module, PyObject *path);
PyObject *module_open_network(PyObject *module, PyObject *settings);
PyObject *module_close_network(PyObject *module, PyObject *ignored);
PyObject *group_span(PyObject *object, PyObject *arguments);
PyObject *group_meet(PyObject *object, PyObject *arguments);
PyObject *group_lose(PyObject *object, PyObject *arguments);
PyObject *group_leave(PyObject *object, PyObject *rank);

/* sites.c */
extern bool all_sites_are_kept;
PyObject *module_keep_sites(PyObject *module, PyObject *wanted);
const un_site *current_site(void);
const un_site *site_of_frame(PyObject *frame);
PyObject *module_site_of(PyObject *module, PyObject *frame);
PyObject *module_prepare_sites(PyObject *module, PyObject *arguments);

/* operators.c */
PyObject *module_load_operators(PyObject *module, PyObject *path);
PyObject *module_take_interruption(PyObject *module, PyObject *ignored);
PyObject *module_forget_operators(PyObject *module, PyObject *name);
PyObject *group_serve_operators(PyObject *object, PyObject *name);
void forget_operators_of(Group *self);

/* pending.c */
void reap(Group *self);
PyObject *group_release_works(PyObject *object, PyObject *ignored);
void end_use(Group *self, PyThreadState *parked);
void close_now(Group *self);
void free_object(PyObject *object);
Pending *new_pending(PyTypeObject *type, bool is_message, PyObject *exceptions);
PyObject *make_exception(const Pending *p, un_status status); /* NULL: another one is set */
PyObject *keep(Group *self, Pending *p);
void raise_error(PyObject *error);
int add_pending_type(PyObject *module, PyTypeObject **type, const char *name, const char *what,
                     int bytes);

/* works.c */
PyObject *group_submit(PyObject *object, PyObject *const *arguments, Py_ssize_t count);
int prepare_works(PyObject *module);

/* messages.c */
PyObject *group_send(PyObject *object, PyObject *const *arguments, Py_ssize_t count);
PyObject *group_recv(PyObject *object, PyObject *const *arguments, Py_ssize_t count);
PyObject *group_isend(PyObject *object, PyObject *const *arguments, Py_ssize_t count);
PyObject *group_irecv(PyObject *object, PyObject *const *arguments, Py_ssize_t count);
int prepare_messages(PyObject *module);

#endif
