/* Numbers in few bits, for slow wires: bfloat16, or the codes of codes.h. */
#include "base/packed.h"

size_t packed_bytes(un_wire format, size_t items) {
    return format == UN_WIRE_BFLOAT16 ? 2 * items : items + packed_blocks(items) * sizeof(float);
}

static void run_kernel(un_wire format, int of_brains, int of_codes, void *to, const void *from,
                       size_t items) {
    bool is_brain = format == UN_WIRE_BFLOAT16;
    un_dtype dtype = is_brain ? un_dtype_of(UN_BFLOAT, 16, 1) : un_dtype_of(UN_FLOAT, 32, 1);
    int which = is_brain ? of_brains : of_codes + (format == UN_WIRE_FP8);
    find_reducer(dtype, (un_reduction)which).run(to, &from, 1, items, 1);
}

void pack_floats(un_wire format, char *to, const float *from, size_t items) {
    run_kernel(format, NARROWING, PACKING_INT8, to, from, items);
}

void unpack_floats(un_wire format, float *to, const char *from, size_t items) {
    run_kernel(format, WIDENING, UNPACKING_INT8, to, from, items);
}
