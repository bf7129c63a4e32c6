"""Kernels between the encoder's products on a CPU, each one pass over rows in cache.

For int8, oneDNN multiplies integers and knows one scale for all rows. So these kernels multiply
each row by its own scale, add the bias, do what follows (residual and LayerNorm, GELU, or heads)
and quantise the row for the next product. `DynamicInt8` does the same in torch. All run on the
calling thread, and a row's results depend on no other row. Imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import int32, njit, types, uint8, uint32
from numba.extending import intrinsic

from cluster.common.kernels.cpu import vectors
from cluster.common.kernels.cpu.arithmetic import as_bits, as_float, number, stored
from cluster.common.kernels.cpu.rows import SUMS, add_norm_row
from cluster.common.kernels.cpu.tile_instructions import address
from cluster.common.kernels.cpu.vectors import LANES
from cluster.common.model.layers import LEAST_SCALE, MIDDLE, MOST

BLOCK = 32  # rows whose values are written together: of one dimension they fill a cache line
_LEAST, _MOST = np.float32(LEAST_SCALE), np.float32(MOST)
# From 2 ** 23 on a float32 has no fraction: adding this rounds to the nearest integer, ties to
# even, and leaves the integer plus MIDDLE in the lowest byte.
_WHOLE = np.float32(1.5 * 2**23 + MIDDLE)
_WIDEST = 4.75  # beyond it the normal distribution is 0 or 1 to within 2e-6
_SQUARES = 2 / _WIDEST**2
_NORMAL = (  # (normal distribution of x - 1/2) / x, by powers of _SQUARES * x * x - 1
    *(0.0014624251, -0.0040010842, 0.0047624232, -0.0068000434, 0.0134994816, -0.0218386576),
    *(0.0304002576, -0.0405341685, 0.0532332584, -0.0736690909, 0.1487483531),
)
_ONE = np.float32(1)
_intrinsic: Any = intrinsic


@njit(fastmath=SUMS, nogil=True, cache=True)
def put_queries_keys(row: Any, r: Any, begin: Any, q: Any, k: Any, key_sums: Any) -> None:
    """Put row r (2 * d numbers or more) into the heads, and add its keys to key_sums."""
    n_head, _, head_dim = q.shape
    d = n_head * head_dim
    for h in range(n_head):
        first = h * head_dim
        for c in range(head_dim):
            q[h, r, c] = row[first + c]
        for c in range(head_dim):
            key = row[d + first + c]
            k[h, begin + r, c] = key
            key_sums[first + c] += number(key)


@njit(nogil=True, cache=True)
def put_values(rows: Any, begin: Any, v: Any) -> None:
    """Put at most BLOCK rows [n, d] of positions from `begin` on into heads.

    By single rows this takes six times as long where v lies as [H, Dh, T].
    """
    n_head, _, head_dim = v.shape
    n = len(rows)
    if v.strides[1] < v.strides[2]:
        for h in range(n_head):
            for c in range(head_dim):
                to, column = v[h, begin : begin + n, c], rows[:, h * head_dim + c]
                for r in range(n):
                    to[r] = column[r]
    else:
        for r in range(n):
            for h in range(n_head):
                for c in range(head_dim):
                    v[h, begin + r, c] = rows[r, h * head_dim + c]


@njit(nogil=True, cache=True)
def split(qkv: Any, begin: Any, q: Any, k: Any, v: Any, key_sums: Any) -> None:
    n, d = len(qkv), qkv.shape[1] // 3
    key_sums[:] = np.float32(0)
    for first in range(0, n, BLOCK):
        last = min(n, first + BLOCK)
        for r in range(first, last):
            put_queries_keys(qkv[r], r, begin, q, k, key_sums)
        put_values(qkv[first:last, 2 * d :], begin + first, v)


@dataclass(frozen=True, slots=True)
class Int8Kernels:
    """Rows are uint8 with their zero at MIDDLE, and a float32 scale each; outputs come last.

    `own` is the encoder's dtype: float32, or bfloat16 as uint16. product: own [n, m], not yet
    multiplied by the scales [n] of its rows, and without the float32 bias [m].

    quantize(x, rows, scales): x own [n, m].
    add_norm(x, product, scales, bias, weight, norm_bias, out): x float32 [n, d] += the product; out
        own [n, d] = LayerNorm(x).
    add_norm_quantize(x, product, scales, bias, weight, norm_bias, rows, row_scales): quantised.
    gelu_quantize(product, scales, bias, rows, row_scales): through GELU.
    split(product, scales, bias, begin, q, k, v, key_sums): as `TeamKernels.split`.
    """

    quantize: Callable[..., None]
    add_norm: Callable[..., None]
    add_norm_quantize: Callable[..., None]
    gelu_quantize: Callable[..., None]
    split: Callable[..., None]


@njit(nogil=True, cache=True)
def scale_of(row: Any) -> Any:
    """The row's largest magnitude divided by MOST; NaN where there is a NaN."""
    highest = int32(0)  # without their sign floats compare like integers, and NaN is the largest
    for c in range(len(row)):
        highest = max(highest, int32(as_bits(number(row[c])) & uint32(0x7FFFFFFF)))
    scale = as_float(uint32(highest)) / _MOST
    return _LEAST if scale < _LEAST else scale


@njit(error_model="numpy", nogil=True, cache=True)
def _quantize_row(row: Any, quantized: Any) -> Any:
    """Quantise like `quantize_rows`, but with zero at MIDDLE; returns the scale."""
    scale = scale_of(row)
    inverse = _ONE / scale
    for c in range(len(quantized)):  # no fastmath: the product must be rounded first
        quantized[c] = uint8(as_bits(number(row[c]) * inverse + _WHOLE) & uint32(0xFF))
    return scale


@_intrinsic  # type: ignore[untyped-decorator]
def finish_gelu(_context: Any, _product: Any, _scale: Any, _bias: Any, _to: Any, like: Any) -> Any:
    """GELU(product * scale + bias) of 16 numbers, within 1e-5.

    GELU is x times the normal distribution, which is 1/2 plus x times a polynomial in x * x: the
    one that reaches 1/2 at _WIDEST with the least maximum error of the GELU.

    product: address of numbers like `like`; bias, to: addresses of float32.
    """

    def generate(_context: Any, builder: Any, _: Any, args: Any) -> Any:
        product, scale, bias, to, _like = args
        load = vectors.load_bfloat16 if like == types.uint16 else vectors.load
        scale, bias = vectors.everywhere(builder, scale), vectors.load(builder, bias)
        x = vectors.multiply_add(builder, load(builder, product), scale, bias)
        near = vectors.lesser(builder, x, vectors.constant(_WIDEST))
        near = vectors.greater(builder, near, vectors.constant(-_WIDEST))
        square, one = builder.fmul(near, near), vectors.constant(-1.0)
        u = vectors.multiply_add(builder, square, vectors.constant(_SQUARES), one)  # -1..1
        sums = vectors.constant(_NORMAL[0])
        for coefficient in _NORMAL[1:]:
            sums = vectors.multiply_add(builder, sums, u, vectors.constant(coefficient))
        normal = vectors.multiply_add(builder, near, sums, vectors.constant(0.5))
        vectors.store(builder, builder.fmul(x, normal), to)
        return _context.get_dummy_value()

    signature = (types.int64, types.float32, types.int64, types.int64, like)
    return types.none(*signature), generate


@njit(fastmath={"contract"}, nogil=True, cache=True)
def _finish(product: Any, scale: Any, bias: Any, row: Any) -> None:
    for c in range(len(row)):
        row[c] = stored(number(product[c]) * scale + bias[c], row[c])


@njit(nogil=True, cache=True)
def _finish_gelu_row(product: Any, scale: Any, bias: Any, row: Any) -> None:
    """The row needs LANES numbers or more."""
    m, n_bytes = len(row), product.itemsize
    at, offsets, to = address(product), address(bias), address(row)
    for c in range(0, m, LANES):
        first = min(c, m - LANES)  # the last ones may overlap those before
        finish_gelu(
            at + n_bytes * first, scale, offsets + 4 * first, to + 4 * first, product[first]
        )


@njit(nogil=True, cache=True)
def _quantize(x: Any, rows: Any, scales: Any) -> None:
    for r in range(len(x)):
        scales[r] = _quantize_row(x[r], rows[r])


@njit(nogil=True, cache=True)
def _add_norm(
    x: Any, product: Any, scales: Any, bias: Any, weight: Any, norm_bias: Any, out: Any
) -> None:
    added = np.empty(x.shape[1], np.float32)
    for r in range(len(x)):
        _finish(product[r], scales[r], bias, added)
        add_norm_row(x[r], added, weight, norm_bias, out[r])


@njit(nogil=True, cache=True)
def _add_norm_quantize(
    x: Any,
    product: Any,
    scales: Any,
    bias: Any,
    weight: Any,
    norm_bias: Any,
    rows: Any,
    row_scales: Any,
) -> None:
    added, normed = np.empty(x.shape[1], np.float32), np.empty(x.shape[1], np.float32)
    for r in range(len(x)):
        _finish(product[r], scales[r], bias, added)
        add_norm_row(x[r], added, weight, norm_bias, normed)
        row_scales[r] = _quantize_row(normed, rows[r])


@njit(nogil=True, cache=True)
def _gelu_quantize(product: Any, scales: Any, bias: Any, rows: Any, row_scales: Any) -> None:
    hidden = np.empty(product.shape[1], np.float32)
    for r in range(len(product)):
        _finish_gelu_row(product[r], scales[r], bias, hidden)
        row_scales[r] = _quantize_row(hidden, rows[r])


@njit(nogil=True, cache=True)
def _split(
    product: Any, scales: Any, bias: Any, begin: Any, q: Any, k: Any, v: Any, key_sums: Any
) -> None:
    n, d = len(product), product.shape[1] // 3
    row, values = np.empty_like(product[0, : 2 * d]), np.empty_like(product[:BLOCK, :d])
    key_sums[:] = np.float32(0)
    for first in range(0, n, BLOCK):
        last = min(n, first + BLOCK)
        for r in range(first, last):
            _finish(product[r, : 2 * d], scales[r], bias[: 2 * d], row)
            put_queries_keys(row, r, begin, q, k, key_sums)
            _finish(product[r, 2 * d :], scales[r], bias[2 * d :], values[r - first])
        put_values(values[: last - first], begin + first, v)


def build_int8(own: Any, values: Any) -> Int8Kernels:
    """Compile (or load) the kernels; `own` is uint16 or float32.

    values: like v of `split`, with one head and four dimensions or more.
    """
    shape, plain = (1, LANES), np.zeros(LANES, np.float32)
    x, product = np.zeros(shape, np.float32), np.zeros(shape, own)
    rows, scales = np.zeros(shape, np.uint8), np.zeros(1, np.float32)
    heads, qkv = np.zeros((1, 1, 4), own), np.zeros((1, 12), own)
    _quantize(product, rows, scales)
    _add_norm(x, product, scales, plain, plain, plain, product.copy())
    _add_norm_quantize(x, product, scales, plain, plain, plain, rows, scales)
    _gelu_quantize(product, scales, plain, rows, scales)
    _split(qkv, scales, np.zeros(12, np.float32), 0, heads, heads.copy(), values, plain)
    return Int8Kernels(_quantize, _add_norm, _add_norm_quantize, _gelu_quantize, _split)
