/* The functions of torch's stable C ABI that the operators need, and how an operator fails. They are
 * looked up when the program runs: no header of torch's is needed, and one build serves every torch
 * from 2.11. */
#ifndef UNISONO_TORCH_ABI_H
#define UNISONO_TORCH_ABI_H

#include <stdbool.h>
#include <stdint.h>

#include "unisono.h"

typedef uint64_t stable_value; /* an argument or a result: an integer, or a handle to own */
typedef void *handle;
typedef void operator_body(stable_value *stack, uint64_t arguments, uint64_t results);

enum { DTYPES = 64 };

typedef struct torch_abi {
    int32_t (*library_init_impl)(const char *space, const char *key, const char *file,
                                 uint32_t line, handle *library);
    int32_t (*library_impl)(handle library, const char *name, operator_body *body,
                            uint64_t version);
    int32_t (*call_dispatcher)(const char *name, const char *overload, stable_value *stack,
                               uint64_t version);
    int32_t (*new_string)(const char *text, size_t length, handle *string);
    int32_t (*delete_string)(handle string);
    int32_t (*string_c_str)(handle string, const char **text);
    int32_t (*new_tensor)(handle tensor, handle *same); /* another handle of it */
    int32_t (*delete_tensor)(handle tensor);
    int32_t (*data_ptr)(handle tensor, void **data);
    int32_t (*numel)(handle tensor, int64_t *elements);
    int32_t (*dtype)(handle tensor, int32_t *dtype);
    int32_t (*is_contiguous)(handle tensor, bool *is_contiguous);
    int32_t (*storage_offset)(handle tensor, int64_t *elements);
    int32_t (*storage_size)(handle tensor, int64_t *bytes);
    bool (*grad_mode_is_enabled)(void);
    un_dtype dtypes[DTYPES]; /* by torch's number; 0: not the engine's */
} torch_abi;

extern torch_abi torch;
#define TORCH_VERSION ((uint64_t)2 << 56 | (uint64_t)11 << 48) /* whose behaviour we ask for */

/* Look all of them up in this library; returns NULL, or the name of one that is missing. */
const char *torch_abi_load(const char *path);

/* Raise a RuntimeError in the program: throw std::runtime_error, as torch's own headers do. */
_Noreturn void torch_abi_throw(const char *text);

#endif
