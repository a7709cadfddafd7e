/* The part of UCX's C interface that we use, and its functions, loaded at run time.
 *
 * Declared by hand with UCX's own names, so that a build needs no UCX: the layouts are those of its
 * headers, unchanged since 1.12 except for fields added at the end. tests/native/ucx_layout.c
 * compares them with real headers, and takes the functions' types from
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
    UCS_ERR_BUSY = -15,
    UCS_ERR_CANCELED = -16,
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
};

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
    UCP_OP_ATTR_FIELD_CALLBACK = 1 << 1,
    UCP_OP_ATTR_FIELD_USER_DATA = 1 << 2,
    UCP_OP_ATTR_FIELD_FLAGS = 1 << 4,
    UCP_OP_ATTR_FLAG_NO_IMM_CMPL = 1 << 16,
} ucp_op_attr_t;

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

enum ucp_send_am_flags {
    UCP_AM_SEND_FLAG_EAGER = 1 << 1,
    UCP_AM_SEND_FLAG_RNDV = 1 << 2,
};

typedef enum {
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
    UCP_AM_HANDLER_PARAM_FIELD_CB = 1 << 2,
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
    const char *(*status_string)(ucs_status_t status); /* ucs_status_string */
} ucx;

/* Load libucp from this path, unless a UCX is already loaded: then use that one. Returns NULL,
 * or why it cannot be loaded, in a static buffer. */
const char *load_ucx(const char *path);


#endif
