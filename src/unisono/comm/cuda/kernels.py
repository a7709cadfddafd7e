"""The arithmetic of reductions in CUDA C: the same steps as in csrc/base/reduce.c, so that the bits
are the same. Rows are combined in rank order; half types in float32, rounded once.

Each element is read once from every rank's row and written once to every output: 2 * ranks * size
bytes in all, which is the minimum. A thread takes 16 bytes of each row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from unisono.comm.cuda.driver import Driver
from unisono.comm.reductions import Reduction

MOST_ROWS = 64
"""The most rows that one launch can combine: its arguments hold this many addresses."""

_THREADS = 256
_VECTOR_BYTES = 16

# For each dtype: its type in memory, the type in which it is combined, reading and rounding.
_TYPES = {
    "float32": ("float", "float", "x", "x"),
    "float64": ("double", "double", "x", "x"),
    "float16": ("unsigned short", "float", "widen_half(x)", "round_half(x)"),
    "bfloat16": ("unsigned short", "float", "widen_brain(x)", "round_brain(x)"),
    "int8": ("signed char", "unsigned char", "x", "x"),
    "int16": ("short", "unsigned short", "x", "x"),
    "int32": ("int", "unsigned int", "x", "x"),
    "int64": ("long long", "unsigned long long", "x", "x"),
    "uint8": ("unsigned char", "unsigned char", "x", "x"),
    "uint16": ("unsigned short", "unsigned short", "x", "x"),
    "uint32": ("unsigned int", "unsigned int", "x", "x"),
    "uint64": ("unsigned long long", "unsigned long long", "x", "x"),
    "bool": ("unsigned char", "unsigned char", "x", "x"),
}
_FLOATS = ("float32", "float64", "float16", "bfloat16")
_COMPLEX = {"complex64": "float32", "complex128": "float64"}
_OF_BOOLS = {"sum": "bor", "product": "band", "min": "band", "max": "bor"}

_SOURCE = """
typedef {stored} T;
typedef {combined} A;
typedef {ordered} O;
#define ROWS {rows}
struct Rows {{ const T *from[ROWS]; T *to[ROWS]; }};

__device__ inline float widen_half(unsigned short x) {{
    float wide;
    asm("{{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }}" : "=f"(wide) : "h"(x));
    return wide;
}}
__device__ inline unsigned short round_half(float x) {{
    unsigned short half;
    asm("{{ .reg .b16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h; }}" : "=h"(half) : "f"(x));
    return half;
}}
__device__ inline float widen_brain(unsigned short x) {{
    return __uint_as_float((unsigned int)x << 16);
}}
__device__ inline unsigned short round_brain(float x) {{
    unsigned int bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}}
__device__ inline A load(T x, double factor) {{ return {load}; }}
__device__ inline A combine(A a, A b) {{ return {combine}; }}
__device__ inline T finish(A x, int ranks) {{ return {finish}; }}

struct alignas(16) Vector {{ T at[16 / sizeof(T)]; }};

extern "C" __global__ void reduce_rows(Rows rows, int ranks, int outputs, long long count,
                                       double factor, int aligned) {{
    const int width = 16 / sizeof(T);
    long long first = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * width;
    if (first >= count) return;
    if (aligned && first + width <= count) {{
        Vector x = *(const Vector *)(rows.from[0] + first);
        A sum[width];
        #pragma unroll
        for (int i = 0; i < width; i++) sum[i] = load(x.at[i], factor);
        #pragma unroll 4
        for (int rank = 1; rank < ranks; rank++) {{
            Vector y = *(const Vector *)(rows.from[rank] + first);
            #pragma unroll
            for (int i = 0; i < width; i++) sum[i] = combine(sum[i], load(y.at[i], factor));
        }}
        #pragma unroll
        for (int i = 0; i < width; i++) x.at[i] = finish(sum[i], ranks);
        #pragma unroll 4
        for (int output = 0; output < outputs; output++)
            *(Vector *)(rows.to[output] + first) = x;
        return;
    }}
    for (long long i = first; i < first + width && i < count; i++) {{
        A sum = load(rows.from[0][i], factor);
        for (int rank = 1; rank < ranks; rank++)
            sum = combine(sum, load(rows.from[rank][i], factor));
        T result = finish(sum, ranks);
        for (int output = 0; output < outputs; output++) rows.to[output][i] = result;
    }}
}}
"""


def has_kernel(reduction: str, dtype: str) -> bool:
    """Whether the GPU has this reduction: products of complex numbers run only on the CPU."""
    return reduction != "product" or dtype not in _COMPLEX


def source_of(reduction: str, dtype: str) -> str:
    """The program for a reduction that is defined for a dtype, both by name."""
    dtype = _COMPLEX.get(dtype, dtype)
    if dtype == "bool":
        reduction = _OF_BOOLS.get(reduction, reduction)
    stored, combined, load, finish = _TYPES[dtype]
    is_float = dtype in _FLOATS
    if reduction == "premul_sum":
        scale = "(A)factor" if is_float else "(A)(long long)factor"
        load = f"(A)({load} * {scale})" if is_float else f"(A)((A)x * {scale})"
    if reduction in ("avg", "truncated_avg"):
        divided = "x / (A)ranks" if is_float else "(T)((T)x / ranks)"
        if dtype.startswith("uint"):
            divided = "x / (A)ranks" if dtype in ("uint32", "uint64") else "(T)(x / ranks)"
        finish = finish.replace("x", divided) if finish == "x" else f"{finish[:-3]}({divided})"
    return _SOURCE.format(
        stored=stored,
        combined=combined,
        ordered=combined if is_float else stored,
        rows=MOST_ROWS,
        load=load,
        combine=_combine(reduction, is_float),
        finish=finish,
    )


def _combine(reduction: str, is_float: bool) -> str:
    """How two numbers become one. A NaN wins a minimum; small integers wrap in their own type."""
    if reduction == "product":
        return "a * b" if is_float else "(A)(1u * a * b)"
    if reduction in ("band", "bor", "bxor"):
        return {"band": "a & b", "bor": "a | b", "bxor": "a ^ b"}[reduction]
    if reduction in ("min", "max"):
        sign = "<" if reduction == "min" else ">"
        if is_float:
            return f"(b {sign} a) | (b != b) ? b : a"
        return f"(O)b {sign} (O)a ? b : a"
    return "a + b" if is_float else "(A)(a + b)"


class Kernels:
    """The reductions of one process, each compiled when it is first needed."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._functions: dict[tuple[str, str], Any] = {}

    def reduce(
        self,
        reduction: Reduction,
        dtype: str,
        sources: Sequence[int],
        targets: Sequence[int],
        size: int,
        stream: int,
    ) -> None:
        """Combine rows of `size` bytes in their order into every target; a target may be one of
        the rows. There are at most MOST_ROWS of either."""
        key = reduction.name, dtype
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = self._driver.compile(source_of(*key), "reduce_rows")
        item_bytes = int(getattr(torch, _COMPLEX.get(dtype, dtype)).itemsize)
        table = (ctypes.c_void_p * (2 * MOST_ROWS))()
        table[: len(sources)] = list(sources)
        table[MOST_ROWS : MOST_ROWS + len(targets)] = list(targets)
        addresses = [*sources, *targets]
        aligned = not any(address % _VECTOR_BYTES for address in addresses)
        count = size // item_bytes
        threads = -(-count // (_VECTOR_BYTES // item_bytes))
        self._driver.launch(
            function,
            -(-threads // _THREADS),
            _THREADS,
            stream,
            table,
            ctypes.c_int(len(sources)),
            ctypes.c_int(len(targets)),
            ctypes.c_longlong(count),
            ctypes.c_double(reduction.factor),
            ctypes.c_int(aligned),
        )
