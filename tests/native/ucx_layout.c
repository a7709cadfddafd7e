/* What csrc/network/ucx.h declares by hand, one line each. Compiled as it is, with that; with -DREAL, with
 * UCX's own headers, which then also check the types of the functions. test_ucx_layout.py compares.
 */
#ifdef REAL
#include <ucp/api/ucp.h>
#endif
#include <stdio.h>

#include "network/ucx.h"

#ifdef REAL
struct ucx ucx = {
    .get_version = ucp_get_version,
    .config_read = ucp_config_read,
    .config_modify = ucp_config_modify,
    .config_release = ucp_config_release,
    .init_version = ucp_init_version,
    .cleanup = ucp_cleanup,
    .worker_create = ucp_worker_create,
    .worker_destroy = ucp_worker_destroy,
    .worker_get_address = ucp_worker_get_address,
    .worker_release_address = ucp_worker_release_address,
    .worker_get_efd = ucp_worker_get_efd,
    .worker_arm = ucp_worker_arm,
    .worker_progress = ucp_worker_progress,
    .worker_signal = ucp_worker_signal,
    .worker_set_am_recv_handler = ucp_worker_set_am_recv_handler,
    .ep_create = ucp_ep_create,
    .ep_close_nbx = ucp_ep_close_nbx,
    .am_send_nbx = ucp_am_send_nbx,
    .am_recv_data_nbx = ucp_am_recv_data_nbx,
    .am_data_release = ucp_am_data_release,
    .request_check_status = ucp_request_check_status,
    .request_free = ucp_request_free,
    .status_string = ucs_status_string,
};
#endif

#define CONSTANT(name) printf(#name " %lld\n", (long long)(name))
#define SIZE(type) printf(#type " has %zu bytes\n", sizeof(type))
#define FIELD(type, name) \
    printf(#type "." #name " at %zu, %zu bytes\n", offsetof(type, name), sizeof(((type *)0)->name))

static void statuses(void) {
    SIZE(ucs_status_t);
    CONSTANT(UCS_OK);
    CONSTANT(UCS_INPROGRESS);
    CONSTANT(UCS_ERR_BUSY);
    CONSTANT(UCS_ERR_CANCELED);
    CONSTANT(UCS_ERR_LAST);
    void *pointers[] = {NULL, (void *)1, (void *)4096, (void *)(intptr_t)UCS_ERR_CANCELED,
                        (void *)(intptr_t)UCS_ERR_LAST, (void *)((intptr_t)UCS_ERR_LAST - 1)};
    for (size_t i = 0; i < sizeof pointers / sizeof *pointers; i++)
        printf("pointer %zu: %d %d %d\n", i, UCS_PTR_IS_ERR(pointers[i]),
               UCS_PTR_IS_PTR(pointers[i]), UCS_PTR_STATUS(pointers[i]));
    CONSTANT(UCS_THREAD_MODE_SINGLE);
    CONSTANT(UCS_THREAD_MODE_SERIALIZED);
    CONSTANT(UCS_MEMORY_TYPE_HOST);
}

static void contexts_and_workers(void) {
    CONSTANT(UCP_FEATURE_WAKEUP);
    CONSTANT(UCP_FEATURE_AM);
    CONSTANT(UCP_PARAM_FIELD_FEATURES);
    FIELD(ucp_params_t, field_mask);
    FIELD(ucp_params_t, features);
    FIELD(ucp_params_t, request_size);
    FIELD(ucp_params_t, request_init);
    FIELD(ucp_params_t, request_cleanup);
    FIELD(ucp_params_t, tag_sender_mask);
    FIELD(ucp_params_t, mt_workers_shared);
    FIELD(ucp_params_t, estimated_num_eps);
    FIELD(ucp_params_t, estimated_num_ppn);
    FIELD(ucp_params_t, name);
    SIZE(ucp_params_t);
    CONSTANT(UCP_WORKER_PARAM_FIELD_THREAD_MODE);
    FIELD(ucp_worker_params_t, field_mask);
    FIELD(ucp_worker_params_t, thread_mode);
    FIELD(ucp_worker_params_t, cpu_mask);
    FIELD(ucp_worker_params_t, events);
    FIELD(ucp_worker_params_t, user_data);
    FIELD(ucp_worker_params_t, event_fd);
    FIELD(ucp_worker_params_t, flags);
    FIELD(ucp_worker_params_t, name);
    FIELD(ucp_worker_params_t, am_alignment);
    FIELD(ucp_worker_params_t, client_id);
    SIZE(ucp_worker_params_t);
}

static void endpoints(void) {
    CONSTANT(UCP_ERR_HANDLING_MODE_NONE);
    CONSTANT(UCP_ERR_HANDLING_MODE_PEER);
    CONSTANT(UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
    CONSTANT(UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
    CONSTANT(UCP_EP_PARAM_FIELD_ERR_HANDLER);
    CONSTANT(UCP_EP_CLOSE_FLAG_FORCE);
    FIELD(ucp_err_handler_t, cb);
    FIELD(ucp_err_handler_t, arg);
    FIELD(ucp_ep_params_t, field_mask);
    FIELD(ucp_ep_params_t, address);
    FIELD(ucp_ep_params_t, err_mode);
    FIELD(ucp_ep_params_t, err_handler);
    FIELD(ucp_ep_params_t, user_data);
    FIELD(ucp_ep_params_t, flags);
    FIELD(ucp_ep_params_t, sockaddr);
    FIELD(ucp_ep_params_t, conn_request);
    FIELD(ucp_ep_params_t, name);
    FIELD(ucp_ep_params_t, local_sockaddr);
    SIZE(ucp_ep_params_t);
}

static void messages(void) {
    CONSTANT(UCP_OP_ATTR_FIELD_CALLBACK);
    CONSTANT(UCP_OP_ATTR_FIELD_USER_DATA);
    CONSTANT(UCP_OP_ATTR_FIELD_FLAGS);
    CONSTANT(UCP_OP_ATTR_FLAG_NO_IMM_CMPL);
    FIELD(ucp_request_param_t, op_attr_mask);
    FIELD(ucp_request_param_t, flags);
    FIELD(ucp_request_param_t, request);
    FIELD(ucp_request_param_t, cb);
    FIELD(ucp_request_param_t, cb.send);
    FIELD(ucp_request_param_t, cb.recv_am);
    FIELD(ucp_request_param_t, datatype);
    FIELD(ucp_request_param_t, user_data);
    FIELD(ucp_request_param_t, reply_buffer);
    FIELD(ucp_request_param_t, memory_type);
    FIELD(ucp_request_param_t, recv_info);
    SIZE(ucp_request_param_t);
    CONSTANT(UCP_AM_SEND_FLAG_EAGER);
    CONSTANT(UCP_AM_SEND_FLAG_RNDV);
    CONSTANT(UCP_AM_RECV_ATTR_FLAG_RNDV);
    FIELD(ucp_am_recv_param_t, recv_attr);
    FIELD(ucp_am_recv_param_t, reply_ep);
    CONSTANT(UCP_AM_HANDLER_PARAM_FIELD_ID);
    CONSTANT(UCP_AM_HANDLER_PARAM_FIELD_CB);
    FIELD(ucp_am_handler_param_t, field_mask);
    FIELD(ucp_am_handler_param_t, id);
    FIELD(ucp_am_handler_param_t, flags);
    FIELD(ucp_am_handler_param_t, cb);
    FIELD(ucp_am_handler_param_t, arg);
    SIZE(ucp_am_handler_param_t);
}

int main(void) {
    statuses();
    contexts_and_workers();
    endpoints();
    messages();
    return 0;
}
