"""What `fused_kernels` read and write: weights of all layers stacked, plans, memory between phases.

Tuples of arrays, as compiled code takes them; a dtype says how an element is stored: float32,
uint16 for the bits of a bfloat16, int16 for those of a float16, int8 with a scale. Knows no numba.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cluster.common.model.dims import ModelDims
from cluster.common.model.layers import Linear, quantize_rows
from decoder_worker.cpu.tile_blocks import in_blocks

HEAD_DIM = 64  # of every published checkpoint: a constant, so that loops over it unroll
OUTPUTS = HEAD_DIM  # of a product in one unit: a head
LOGITS = 256  # the same of the last product
N_DIMS_IN_ROWS = 3  # of a product's weights of all layers; in blocks there are two more
PIECE = 128  # most positions that one unit attends to; a window has 12 such

# The phases of a layer, in order.
QKV, SELF, SELF_OUT, CROSS_Q, CROSS, CROSS_OUT, FC1, FC2 = range(8)
N_PHASES = 8


class Products(NamedTuple):
    """One product of every layer, scale * (weight @ x) + bias.

    weight [L, n_out, n_in]: float32, uint16 or int8; or each layer's uint16 or int8 `in_blocks`.
    scale, bias: float32 [L, n_out].
    """

    weight: Any
    scale: Any
    bias: Any


class Layers(NamedTuple):
    """norms: float32 [3 * L + 1, 2, d], weight and bias of each in the order that they come.

    tiles: where products are computed by the CPU's tiles, their configuration
        (`common.kernels.cpu.tile_registers`), and every weight is uint16, or int8
        in blocks; else None.
    """

    qkv: Products
    self_out: Products
    cross_q: Products
    cross_out: Products
    fc1: Products
    fc2: Products
    norms: Any
    tiles: Any


class Head(NamedTuple):
    """weight [n_vocab, d]: float32, uint16, int16 or int8, which for tiles is `in_blocks`.

    scale: float32 [n_vocab]. tiles: as in `Layers`.
    """

    weight: Any
    scale: Any
    tiles: Any


class Pages(NamedTuple):
    """What rows attend to in one pool.

    pool: [page, L, 2, page_size, H, HEAD_DIM].
    pieces: int32 [n, 7]: first row and behind the last, page, first position and behind the last,
        number among the pieces of these rows, positions that the page is laid out for (its size, or
        fewer where a window lies packed in its beginning). n_pieces: int32 [n rows].
    last: int32 [n rows, 2], page and position where a row's own key and value belong (self pool).
    """

    pool: Any
    pieces: Any
    n_pieces: Any
    last: Any


class Memory(NamedTuple):
    """What phases leave for the next, all float32.

    x: the residual stream, normed: the same behind a norm, delta: what is added to it, attended
        and query: all [n, d]. qkv [n, 3 * d], hidden [n, n_mlp].
    highest, total [n, most pieces, H], mixed [n, most pieces, H, HEAD_DIM]: of pieces.
    """

    x: Any
    normed: Any
    delta: Any
    attended: Any
    query: Any
    qkv: Any
    hidden: Any
    highest: Any
    total: Any
    mixed: Any


def new_memory(n_rows: int, most_pieces: int, n_head: int, d: int, n_mlp: int) -> Memory:
    pieces = (most_pieces, n_head)
    widths = [(d,)] * 5 + [(3 * d,), (n_mlp,), pieces, pieces, (*pieces, HEAD_DIM)]
    return Memory._make(np.empty((n_rows, *width), np.float32) for width in widths)


def n_units(units: Any, n_layer: int) -> int:
    """Of all layers, with one for each phase's conclusion and one for the start.

    units: int64 [N_PHASES], of each phase of a layer.
    """
    return 1 + n_layer * int(units.sum() + N_PHASES)


def n_head_units(n_vocab: int) -> int:
    return -(-n_vocab // LOGITS)


def n_likely_units(n_rows: int, n_vocab: int, n_words: int) -> int:
    """Of words, of the tokens behind them, and one for each row whose token is to be chosen."""
    return -(-n_words // LOGITS) + max(1, (n_vocab - n_words) // LOGITS) + n_rows


def stack_layers(
    tensors: Mapping[str, Tensor],
    dims: ModelDims,
    *,
    int8: bool,
    tiles: Any = None,
    blocks: bool = False,
) -> Layers:
    """Copies of the decoder's weights, from tensors by Hugging Face's names.

    tiles: as in `Layers`. blocks: lay the weights out `in_blocks`, for tiles alone.
    """
    prefixes = [f"decoder.layers.{layer}" for layer in range(dims.n_text_layer)]

    def stack(*names: str) -> Products:
        each = [[Linear.load(tensors, f"{prefix}.{name}") for name in names] for prefix in prefixes]
        return _stack([Linear.fused(parts) for parts in each], int8, blocks)

    norms = [
        f"{prefix}.{name}_layer_norm"
        for prefix in prefixes
        for name in ("self_attn", "encoder_attn", "final")
    ]
    pairs = [
        torch.stack((tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
        for name in (*norms, "decoder.layer_norm")
    ]
    return Layers(
        qkv=stack(*(f"self_attn.{name}_proj" for name in "qkv")),
        self_out=stack("self_attn.out_proj"),
        cross_q=stack("encoder_attn.q_proj"),
        cross_out=stack("encoder_attn.out_proj"),
        fc1=stack("fc1"),
        fc2=stack("fc2"),
        norms=torch.stack(pairs).float().numpy(),
        tiles=tiles,
    )


def plain_head(weight: Tensor, *, int8: bool, tiles: Any = None) -> Head:
    """weight [n_vocab, d], float32, or of 16 bits: as it lies there, or in 8 bits."""
    array, scale = _plain(weight, int8)
    return Head(in_blocks(array) if int8 and tiles is not None else array, scale, tiles)


def empty_head(n_vocab: int, d: int, dtype: Any, tiles: Any) -> Head:
    """A head of zeros as `plain_head` gives it for a dtype, to compile for."""
    weight = np.zeros((n_vocab, d), dtype)
    in_tiles = tiles is not None and weight.itemsize == 1
    return Head(in_blocks(weight) if in_tiles else weight, np.zeros(n_vocab, np.float32), tiles)


def _stack(linears: list[Linear], int8: bool, blocks: bool) -> Products:
    arrays, scales = zip(*(_plain(linear.weight, int8) for linear in linears), strict=True)
    if blocks:
        arrays = tuple(in_blocks(array) for array in arrays)
    biases = [
        torch.zeros(len(linear.weight)) if linear.bias is None else linear.bias.float()
        for linear in linears
    ]
    return Products(np.stack(arrays), np.stack(scales), torch.stack(biases).numpy())


def _plain(weight: Tensor, int8: bool) -> tuple[Any, Any]:
    """weight [n_out, n_in] as `Products` have it, and a scale for each output."""
    if int8:
        quantized, scale = quantize_rows(weight)
        return quantized.numpy(), scale.numpy()
    bits = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}.get(weight.dtype)
    array = weight.numpy() if bits is None else weight.view(bits).numpy()
    return array, np.ones(len(weight), np.float32)
