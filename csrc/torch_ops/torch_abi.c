#include "torch_ops/torch_abi.h"

#include <dlfcn.h>
#include <stddef.h>

torch_abi torch;

static struct {
    void *(*allocate)(size_t bytes);
    void (*construct)(void *error, const char *text);
    void (*destruct)(void *error);
    void (*raise)(void *error, void *type, void (*destruct)(void *));
    void *type;
} cpp; /* the C++ library's, by the names that its ABI gives them */

enum { RUNTIME_ERROR_BYTES = 2 * sizeof(void *) };

static const struct {
    const char *name;
    void *to;
} symbols[] = {
    {"aoti_torch_library_init_impl", &torch.library_init_impl},
    {"torch_library_impl", &torch.library_impl},
    {"torch_call_dispatcher", &torch.call_dispatcher},
    {"torch_new_string_handle", &torch.new_string},
    {"torch_delete_string", &torch.delete_string},
    {"torch_string_c_str", &torch.string_c_str},
    {"aoti_torch_new_tensor_handle", &torch.new_tensor},
    {"aoti_torch_delete_tensor_object", &torch.delete_tensor},
    {"aoti_torch_get_data_ptr", &torch.data_ptr},
    {"aoti_torch_get_numel", &torch.numel},
    {"aoti_torch_get_dtype", &torch.dtype},
    {"aoti_torch_is_contiguous", &torch.is_contiguous},
    {"aoti_torch_get_storage_offset", &torch.storage_offset},
    {"aoti_torch_get_storage_size", &torch.storage_size},
    {"aoti_torch_grad_mode_is_enabled", &torch.grad_mode_is_enabled},
    {"__cxa_allocate_exception", &cpp.allocate},
    {"_ZNSt13runtime_errorC1EPKc", &cpp.construct},
    {"_ZNSt13runtime_errorD1Ev", &cpp.destruct},
    {"__cxa_throw", &cpp.raise},
    {"_ZTISt13runtime_error", &cpp.type},
};

static const struct {
    const char *name;
    unsigned code, bits;
} dtype_symbols[] = {
    {"aoti_torch_dtype_float16", UN_FLOAT, 16},
    {"aoti_torch_dtype_bfloat16", UN_BFLOAT, 16},
    {"aoti_torch_dtype_float32", UN_FLOAT, 32},
    {"aoti_torch_dtype_float64", UN_FLOAT, 64},
    {"aoti_torch_dtype_int8", UN_INT, 8},
    {"aoti_torch_dtype_uint8", UN_UINT, 8},
    {"aoti_torch_dtype_int16", UN_INT, 16},
    {"aoti_torch_dtype_uint16", UN_UINT, 16},
    {"aoti_torch_dtype_int32", UN_INT, 32},
    {"aoti_torch_dtype_uint32", UN_UINT, 32},
    {"aoti_torch_dtype_int64", UN_INT, 64},
    {"aoti_torch_dtype_uint64", UN_UINT, 64},
    {"aoti_torch_dtype_complex64", UN_COMPLEX, 64},
    {"aoti_torch_dtype_complex128", UN_COMPLEX, 128},
    {"aoti_torch_dtype_bool", UN_BOOL, 8},
};

static bool find(void *library, const char *name, void *to) {
    void *found = dlsym(library, name); /* in what the library needs, too */
    *(void **)to = found;
    return found;
}

const char *torch_abi_load(const char *path) {
    void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (!library) return path;
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++)
        if (!find(library, symbols[i].name, symbols[i].to)) return symbols[i].name;
    for (size_t i = 0; i < sizeof dtype_symbols / sizeof *dtype_symbols; i++) {
        int32_t (*number_of)(void);
        if (!find(library, dtype_symbols[i].name, &number_of)) return dtype_symbols[i].name;
        int32_t number = number_of();
        if (number >= 0 && number < DTYPES)
            torch.dtypes[number] = un_dtype_of(dtype_symbols[i].code, dtype_symbols[i].bits, 1);
    }
    return NULL;
}

void torch_abi_throw(const char *text) {
    void *error = cpp.allocate(RUNTIME_ERROR_BYTES);
    cpp.construct(error, text);
    cpp.raise(error, cpp.type, cpp.destruct);
    __builtin_unreachable();
}
