/* The part of DLPack's stable ABI that we read (https://github.com/dmlc/dlpack, version 1.3). */
#ifndef UNISONO_DLPACK_H
#define UNISONO_DLPACK_H

#include <stdint.h>

enum { DLPACK_CPU = 1, DLPACK_CUDA = 2 };

typedef struct dl_tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t dims;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: contiguous */
    uint64_t byte_offset;
} dl_tensor;

/* What a capsule named "dltensor" points to starts with the tensor itself. */
typedef struct dl_managed_tensor {
    dl_tensor tensor;
    void *manager;
    void (*deleter)(struct dl_managed_tensor *);
} dl_managed_tensor;

/* What `type.__dlpack_c_exchange_api__`, a capsule named "dlpack_exchange_api", points to. */
typedef struct dl_exchange_api {
    struct {
        uint32_t major, minor;
    } version;
    void *previous;
    void *allocate;
    void *managed_from_object;
    void *managed_to_object;
    int (*tensor_from_object)(void *object, dl_tensor *tensor); /* borrows; needs the GIL */
    void *current_stream;
} dl_exchange_api;

#endif
