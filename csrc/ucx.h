/* UCX's C interface, as far as we use it, and its functions, loaded when the program runs.
 *
 * Declared by hand with UCX's own names, so that a build needs no UCX: the layouts are those of
 * its headers, unchanged since 1.12 up to the fields that came later at the end.
 * tests/native/ucx_layout.c compares them with real headers, and takes the functions' types from
 * there: it includes UCX's header first, and this one leaves its own declarations out.
 */
#ifndef UNISONO_UCX_H
#define UNISONO_UCX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

enum { UCX_API_MAJOR = 1, UCX_API_MINOR = 12 }; /* what ucp_init_version is asked for */

#ifndef UCP_H_

/* -- ucs ------------------------------------------------------------------------------------- */

typedef enum {
    UCS_OK = 0,
    UCS_INPROGRESS = 1,
    UCS_ERR_NO_MESSAGE = -1,
    UCS_ERR_NO_RESOURCE = -2,
    UCS_ERR_IO_ERROR = -3,
    UCS_ERR_NO_MEMORY = -4,
    UCS_ERR_INVALID_PARAM = -5,
    UCS_ERR_UNREACHABLE = -6,
    UCS_ERR_INVALID_ADDR = -7,
    UCS_ERR_NOT_IMPLEMENTED = -8,
    UCS_ERR_MESSAGE_TRUNCATED = -9,
    UCS_ERR_BUSY = -15,
    UCS_ERR_CANCELED = -16,
    UCS_ERR_TIMED_OUT = -20,
    UCS_ERR_UNSUPPORTED = -22,
    UCS_ERR_REJECTED = -23,
    UCS_ERR_NOT_CONNECTED = -24,
    UCS_ERR_CONNECTION_RESET = -25,
    UCS_ERR_ENDPOINT_TIMEOUT = -80,
    UCS_ERR_LAST = -100
} __attribute__((packed)) ucs_status_t; /* one byte */

typedef void *ucs_status_ptr_t;

#define UCS_PTR_IS_ERR(pointer) ((uintptr_t)(pointer) >= (uintptr_t)UCS_ERR_LAST)
#define UCS_PTR_IS_PTR(pointer) ((uintptr_t)(pointer) - 1 < (uintptr_t)UCS_ERR_LAST - 1)
#define UCS_PTR_RAW_STATUS(pointer) ((ucs_status_t)(intptr_t)(pointer))
#define UCS_PTR_STATUS(pointer) \
    (UCS_PTR_IS_PTR(pointer) ? UCS_INPROGRESS : UCS_PTR_RAW_STATUS(pointer))

typedef enum {
    UCS_THREAD_MODE_SINGLE,
    UCS_THREAD_MODE_SERIALIZED,
    UCS_THREAD_MODE_MULTI,
} ucs_thread_mode_t;

typedef struct {
    unsigned long ucs_bits[1024 / (8 * sizeof(unsigned long))];
} ucs_cpu_set_t;

typedef struct ucs_sock_addr {
    const struct sockaddr *addr;
    socklen_t addrlen;
} ucs_sock_addr_t;

typedef enum ucs_memory_type {
    UCS_MEMORY_TYPE_HOST,
    UCS_MEMORY_TYPE_CUDA,
} ucs_memory_type_t;

/* -- context and worker ---------------------------------------------------------------------- */

typedef struct ucp_context *ucp_context_h;
typedef struct ucp_config ucp_config_t;
typedef struct ucp_worker *ucp_worker_h;
typedef struct ucp_address ucp_address_t;
typedef struct ucp_ep *ucp_ep_h;
typedef struct ucp_conn_request *ucp_conn_request_h;
typedef struct ucp_mem *ucp_mem_h;
typedef struct ucp_tag_recv_info ucp_tag_recv_info_t;
typedef uint64_t ucp_datatype_t;

enum ucp_params_field {
    UCP_PARAM_FIELD_FEATURES = 1 << 0,
    UCP_PARAM_FIELD_REQUEST_SIZE = 1 << 1,
    UCP_PARAM_FIELD_REQUEST_INIT = 1 << 2,
    UCP_PARAM_FIELD_REQUEST_CLEANUP = 1 << 3,
    UCP_PARAM_FIELD_TAG_SENDER_MASK = 1 << 4,
    UCP_PARAM_FIELD_MT_WORKERS_SHARED = 1 << 5,
    UCP_PARAM_FIELD_ESTIMATED_NUM_EPS = 1 << 6,
    UCP_PARAM_FIELD_ESTIMATED_NUM_PPN = 1 << 7,
    UCP_PARAM_FIELD_NAME = 1 << 8,
};

enum ucp_feature {
    UCP_FEATURE_WAKEUP = 1 << 4,
    UCP_FEATURE_AM = 1 << 6,
};

typedef struct ucp_params {
    uint64_t field_mask;
    uint64_t features;
    size_t request_size;
    void (*request_init)(void *request);
    void (*request_cleanup)(void *request);
    uint64_t tag_sender_mask;
    int mt_workers_shared;
    size_t estimated_num_eps;
    size_t estimated_num_ppn;
    const char *name;
    size_t node_local_id;
} ucp_params_t;

enum ucp_worker_params_field {
    UCP_WORKER_PARAM_FIELD_THREAD_MODE = 1 << 0,
    UCP_WORKER_PARAM_FIELD_CPU_MASK = 1 << 1,
    UCP_WORKER_PARAM_FIELD_EVENTS = 1 << 2,
    UCP_WORKER_PARAM_FIELD_USER_DATA = 1 << 3,
    UCP_WORKER_PARAM_FIELD_EVENT_FD = 1 << 4,
    UCP_WORKER_PARAM_FIELD_FLAGS = 1 << 5,
    UCP_WORKER_PARAM_FIELD_NAME = 1 << 6,
    UCP_WORKER_PARAM_FIELD_AM_ALIGNMENT = 1 << 7,
    UCP_WORKER_PARAM_FIELD_CLIENT_ID = 1 << 8,
};

enum ucp_wakeup_event_types {
    UCP_WAKEUP_TX = 1 << 10,
    UCP_WAKEUP_RX = 1 << 11,
    UCP_WAKEUP_EDGE = 1 << 16,
};

typedef enum {
    UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK = 1 << 0,
} ucp_worker_flags_t;

typedef struct ucp_worker_params {
    uint64_t field_mask;
    ucs_thread_mode_t thread_mode;
    ucs_cpu_set_t cpu_mask;
    unsigned events;
    void *user_data;
    int event_fd;
    uint64_t flags;
    const char *name;
    size_t am_alignment;
    uint64_t client_id;
} ucp_worker_params_t;

/* -- endpoints ------------------------------------------------------------------------------- */

typedef enum {
    UCP_ERR_HANDLING_MODE_NONE,
    UCP_ERR_HANDLING_MODE_PEER,
} ucp_err_handling_mode_t;

typedef void (*ucp_err_handler_cb_t)(void *argument, ucp_ep_h ep, ucs_status_t status);

typedef struct ucp_err_handler {
    ucp_err_handler_cb_t cb;
    void *arg;
} ucp_err_handler_t;

enum ucp_ep_params_field {
    UCP_EP_PARAM_FIELD_REMOTE_ADDRESS = 1 << 0,
    UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE = 1 << 1,
    UCP_EP_PARAM_FIELD_ERR_HANDLER = 1 << 2,
    UCP_EP_PARAM_FIELD_USER_DATA = 1 << 3,
    UCP_EP_PARAM_FIELD_SOCK_ADDR = 1 << 4,
    UCP_EP_PARAM_FIELD_FLAGS = 1 << 5,
    UCP_EP_PARAM_FIELD_CONN_REQUEST = 1 << 6,
    UCP_EP_PARAM_FIELD_NAME = 1 << 7,
    UCP_EP_PARAM_FIELD_LOCAL_SOCK_ADDR = 1 << 8,
};

enum ucp_ep_params_flags_field {
    UCP_EP_PARAMS_FLAGS_CLIENT_SERVER = 1 << 0,
    UCP_EP_PARAMS_FLAGS_NO_LOOPBACK = 1 << 1,
};

typedef struct ucp_ep_params {
    uint64_t field_mask;
    const ucp_address_t *address;
    ucp_err_handling_mode_t err_mode;
    ucp_err_handler_t err_handler;
    void *user_data;
    unsigned flags;
    ucs_sock_addr_t sockaddr;
    ucp_conn_request_h conn_request;
    const char *name;
    ucs_sock_addr_t local_sockaddr;
} ucp_ep_params_t;

typedef enum {
    UCP_EP_CLOSE_FLAG_FORCE = 1 << 0,
} ucp_ep_close_flags_t;

/* -- operations and active messages ---------------------------------------------------------- */

typedef enum {
    UCP_OP_ATTR_FIELD_REQUEST = 1 << 0,
    UCP_OP_ATTR_FIELD_CALLBACK = 1 << 1,
    UCP_OP_ATTR_FIELD_USER_DATA = 1 << 2,
    UCP_OP_ATTR_FIELD_DATATYPE = 1 << 3,
    UCP_OP_ATTR_FIELD_FLAGS = 1 << 4,
    UCP_OP_ATTR_FIELD_REPLY_BUFFER = 1 << 5,
    UCP_OP_ATTR_FIELD_MEMORY_TYPE = 1 << 6,
    UCP_OP_ATTR_FIELD_RECV_INFO = 1 << 7,
    UCP_OP_ATTR_FLAG_NO_IMM_CMPL = 1 << 16,
    UCP_OP_ATTR_FLAG_FAST_CMPL = 1 << 17,
    UCP_OP_ATTR_FLAG_FORCE_IMM_CMPL = 1 << 18,
    UCP_OP_ATTR_FLAG_MULTI_SEND = 1 << 19,
} ucp_op_attr_t;

enum ucp_dt_type {
    UCP_DATATYPE_CONTIG = 0,
    UCP_DATATYPE_IOV = 2,
    UCP_DATATYPE_SHIFT = 3,
};

#define ucp_dt_make_contig(element_bytes) \
    (((ucp_datatype_t)(element_bytes) << UCP_DATATYPE_SHIFT) | UCP_DATATYPE_CONTIG)

typedef struct ucp_dt_iov { /* what a buffer of datatype UCP_DATATYPE_IOV is an array of */
    void *buffer;
    size_t length;
} ucp_dt_iov_t;

typedef void (*ucp_send_nbx_callback_t)(void *request, ucs_status_t status, void *user_data);
typedef void (*ucp_tag_recv_nbx_callback_t)(void *request, ucs_status_t status,
                                            const ucp_tag_recv_info_t *tag_info, void *user_data);
typedef void (*ucp_stream_recv_nbx_callback_t)(void *request, ucs_status_t status, size_t length,
                                               void *user_data);
typedef void (*ucp_am_recv_data_nbx_callback_t)(void *request, ucs_status_t status, size_t length,
                                                void *user_data);

typedef struct {
    uint32_t op_attr_mask;
    uint32_t flags;
    void *request;
    union {
        ucp_send_nbx_callback_t send;
        ucp_tag_recv_nbx_callback_t recv;
        ucp_stream_recv_nbx_callback_t recv_stream;
        ucp_am_recv_data_nbx_callback_t recv_am;
    } cb;
    ucp_datatype_t datatype;
    void *user_data;
    void *reply_buffer;
    ucs_memory_type_t memory_type;
    union {
        size_t *length;
        ucp_tag_recv_info_t *tag_info;
    } recv_info;
    ucp_mem_h memh;
    ucp_datatype_t remote_datatype;
    const void *remote;
    size_t remote_count;
} ucp_request_param_t;

enum ucp_am_cb_flags {
    UCP_AM_FLAG_WHOLE_MSG = 1 << 0,
    UCP_AM_FLAG_PERSISTENT_DATA = 1 << 1,
};

enum ucp_send_am_flags {
    UCP_AM_SEND_FLAG_REPLY = 1 << 0,
    UCP_AM_SEND_FLAG_EAGER = 1 << 1,
    UCP_AM_SEND_FLAG_RNDV = 1 << 2,
    UCP_AM_SEND_FLAG_COPY_HEADER = 1 << 3, /* since 1.15 */
};

typedef enum {
    UCP_AM_RECV_ATTR_FIELD_REPLY_EP = 1 << 0,
    UCP_AM_RECV_ATTR_FLAG_DATA = 1 << 16,
    UCP_AM_RECV_ATTR_FLAG_RNDV = 1 << 17,
} ucp_am_recv_attr_t;

typedef struct ucp_am_recv_param {
    uint64_t recv_attr;
    ucp_ep_h reply_ep;
} ucp_am_recv_param_t;

typedef ucs_status_t (*ucp_am_recv_callback_t)(void *argument, const void *header,
                                               size_t header_length, void *data, size_t length,
                                               const ucp_am_recv_param_t *param);

enum ucp_am_handler_param_field {
    UCP_AM_HANDLER_PARAM_FIELD_ID = 1 << 0,
    UCP_AM_HANDLER_PARAM_FIELD_FLAGS = 1 << 1,
    UCP_AM_HANDLER_PARAM_FIELD_CB = 1 << 2,
    UCP_AM_HANDLER_PARAM_FIELD_ARG = 1 << 3,
};

typedef struct ucp_am_handler_param {
    uint64_t field_mask;
    unsigned id;
    uint32_t flags;
    ucp_am_recv_callback_t cb;
    void *arg;
} ucp_am_handler_param_t;

#endif /* UCP_H_ */

/* -- the functions: ucx.worker_progress is ucp_worker_progress -------------------------------- */

extern struct ucx {
    void (*get_version)(unsigned *major, unsigned *minor, unsigned *release);
    ucs_status_t (*config_read)(const char *prefix, const char *file, ucp_config_t **config);
    ucs_status_t (*config_modify)(ucp_config_t *config, const char *name, const char *value);
    void (*config_release)(ucp_config_t *config);
    ucs_status_t (*init_version)(unsigned major, unsigned minor, const ucp_params_t *params,
                                 const ucp_config_t *config, ucp_context_h *context);
    void (*cleanup)(ucp_context_h context);
    ucs_status_t (*worker_create)(ucp_context_h context, const ucp_worker_params_t *params,
                                  ucp_worker_h *worker);
    void (*worker_destroy)(ucp_worker_h worker);
    ucs_status_t (*worker_get_address)(ucp_worker_h worker, ucp_address_t **address,
                                       size_t *length);
    void (*worker_release_address)(ucp_worker_h worker, ucp_address_t *address);
    ucs_status_t (*worker_get_efd)(ucp_worker_h worker, int *descriptor);
    ucs_status_t (*worker_arm)(ucp_worker_h worker);
    unsigned (*worker_progress)(ucp_worker_h worker);
    ucs_status_t (*worker_signal)(ucp_worker_h worker);
    ucs_status_t (*worker_set_am_recv_handler)(ucp_worker_h worker,
                                               const ucp_am_handler_param_t *param);
    ucs_status_t (*ep_create)(ucp_worker_h worker, const ucp_ep_params_t *params, ucp_ep_h *ep);
    ucs_status_ptr_t (*ep_close_nbx)(ucp_ep_h ep, const ucp_request_param_t *param);
    ucs_status_ptr_t (*am_send_nbx)(ucp_ep_h ep, unsigned id, const void *header,
                                    size_t header_length, const void *buffer, size_t count,
                                    const ucp_request_param_t *param);
    ucs_status_ptr_t (*am_recv_data_nbx)(ucp_worker_h worker, void *data, void *buffer,
                                         size_t count, const ucp_request_param_t *param);
    void (*am_data_release)(ucp_worker_h worker, void *data);
    ucs_status_t (*request_check_status)(void *request);
    void (*request_free)(void *request);
    void (*request_cancel)(ucp_worker_h worker, void *request);
    const char *(*status_string)(ucs_status_t status); /* ucs_status_string */
} ucx;

/* Load libucp from this path, unless a UCX is loaded already: then that one serves. NULL, or why it
 * cannot be loaded, in a static buffer. */
const char *load_ucx(const char *path);
bool ucx_is_loaded(void);

#endif
