"""Arrays that the compiled decoder reads and writes: weights, plans, memory between phases, runs.

A dtype says how an element is stored: float32, uint16 for a bfloat16's bits, int8 with a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cluster.common.kernels.cpu.machine_code import as_array
from cluster.common.kernels.cpu.tile_registers import (
    BLOCK_OUTPUTS,
    INPUTS_OF_GROUP,
    TILE_ROW_BYTES,
    TILE_ROWS,
    TILES_OF_BLOCK,
    VECTORS,
)
from cluster.common.model.dims import ModelDims
from cluster.common.model.layers import Linear, quantize_rows

HEAD_DIM = 64  # of every published checkpoint: a constant, so that loops over it unroll
OUTPUTS = HEAD_DIM  # of a product in one unit
LOGITS = 256  # of the head's product in one unit
N_DIMS_IN_ROWS = 3  # of a product's weights of all layers; in blocks there are two more
PIECE = 128  # most positions that one unit attends to; a window has 12 such

ROWS_OF_TILE = 8  # of x in one tile, each with its upper and its lower halves

# Places in `Run.control`.
ENDED, LEFT, WAITED_BEFORE = range(3)

# The phases of a layer, in order.
QKV, SELF, SELF_OUT, CROSS_Q, CROSS, CROSS_OUT, FC1, FC2 = range(8)
N_PHASES = 8


class Kinds(NamedTuple):
    """The dtypes and layouts that a decoder is compiled for, as in `stack_layers` and `Head`."""

    weight: Any
    own: Any
    cross: Any
    head: Any
    tiles: Any = None
    blocks: bool = False
    head_tiles: Any = None

    def __str__(self) -> str:
        layout, of_head = _layout(self.tiles), _layout(self.head_tiles)
        other = "" if of_head == layout else f" head{of_head}"
        dtypes = " ".join(dtype.__name__ for dtype in self[:4])
        return dtypes + layout + (" in blocks" if self.blocks else "") + other


def _layout(tiles: Any) -> str:
    return "" if tiles is None else " vectors" if tiles is VECTORS else " tiles"


class Products(NamedTuple):
    """One product of every layer: scale * (weight @ x) + bias.

    weight: float32, uint16 or int8 [L, n_out, n_in], or uint16 or int8 `in_blocks`, layer by layer.
    scale, bias: float32 [L, n_out].
    """

    weight: Any
    scale: Any
    bias: Any


class Layers(NamedTuple):
    """norms: float32 [3 * L + 1, 2, d], weight and bias of each, in order of use.

    tiles: the kind of product, from `products_for`. For tiles weights are uint16, or int8 in
    blocks; for vectors they are int8 in blocks.
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
    """weight: float32 [n_vocab, d], or int8, which is `in_blocks` for tiles and for vectors.

    scale: float32 [n_vocab]. tiles: the kind of product, from `products_for`.
    """

    weight: Any
    scale: Any
    tiles: Any


class Pages(NamedTuple):
    """What rows attend to in one pool, [page, L, 2, page_size, H, HEAD_DIM].

    pieces: int32 [n, 7]: first row and row behind the last, page, first position and position
        behind the last, index among the pieces of these rows, positions that the page is laid out
        for (its size, or fewer if a window lies packed in it). n_pieces: int32 [n rows].
    last: int32 [n rows, 2], page and position of a row's own key and value (self pool).
    """

    pool: Any
    pieces: Any
    n_pieces: Any
    last: Any


class Memory(NamedTuple):
    """Results of phases for later ones, all float32.

    x: the residual stream, normed: the same after a norm, delta: to be added to it, attended and
        query: all [n, d]. qkv [n, 3 * d], hidden [n, n_mlp].
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


class Embedding(NamedTuple):
    """tokens [n_vocab, d], positions [n_text_ctx, d]: float32, or bits of bfloat16 as uint16."""

    tokens: Any
    positions: Any


class Choice(NamedTuple):
    """`LogitRules` as arrays. table: int64. suppressed: float32 [n_vocab]. not_first: int64."""

    table: Any
    suppressed: Any
    not_first: Any
    marks: Any


class Run(NamedTuple):
    """One run of steps.

    slots: int64 [n]. tokens: int64, logprobs: float32, both [most steps, n].
    logits: float32 [n, n_vocab], of the last step.
    control: int64 [3]. ENDED: steps that were made, 0 while the run goes on; LEFT: whether a helper
        has left; WAITED_BEFORE: the team's counter WAITED at the start.
    interrupt: int64 [1], set by any thread to end the run with its step.
    """

    slots: Any
    tokens: Any
    logprobs: Any
    logits: Any
    control: Any
    interrupt: Any


def new_memory(n_rows: int, most_pieces: int, n_head: int, d: int, n_mlp: int) -> Memory:
    pieces = (most_pieces, n_head)
    widths = [(d,)] * 5 + [(3 * d,), (n_mlp,), pieces, pieces, (*pieces, HEAD_DIM)]
    return Memory._make(np.empty((n_rows, *width), np.float32) for width in widths)


def n_units(units: Any, n_layer: int) -> int:
    """Units of all layers, with their conclusions and the start. units: int64 [N_PHASES]."""
    return 1 + n_layer * int(units.sum() + N_PHASES)


def n_head_units(n_vocab: int) -> int:
    return -(-n_vocab // LOGITS)


def stack_layers(
    tensors: Mapping[str, Tensor],
    dims: ModelDims,
    *,
    int8: bool,
    tiles: Any = None,
    blocks: bool = False,
) -> Layers:
    """Copy the decoder's weights. tiles: as in `Layers`. blocks: lay them out `in_blocks`."""
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
    """weight: float32 [n_vocab, d], kept as it is, or converted to 8 bits, which `tiles` need."""
    array, scale = _plain(weight, int8)
    return Head(array if tiles is None else in_blocks(array), scale, tiles)


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
    """weight [n_out, n_in] as in `Products`, and a scale for each output."""
    if int8:
        quantized, scale = quantize_rows(weight)
        return quantized.numpy(), scale.numpy()
    return as_array(weight), np.ones(len(weight), np.float32)


def new_run(slots: Any, most: int, logits: Any, interrupt: Any) -> Run:
    n = len(slots)
    tokens, logprobs = np.empty((most, n), np.int64), np.empty((most, n), np.float32)
    return Run(slots, tokens, logprobs, logits, np.zeros(3, np.int64), interrupt)


def step_units(units: Any, n_layer: int, n_rows: int, n_vocab: int) -> Any:
    """int64 [3]: units of a step's layers, of its head, and of the whole step."""
    layers, head = n_units(units, n_layer), n_head_units(n_vocab)
    return np.array([layers, head, 1 + layers + head + n_rows], np.int64)


def fits_tiles(dims: ModelDims) -> bool:
    """Whether whole tiles make up every product of the layers; the head may end within one."""
    return all(width % BLOCK_OUTPUTS == 0 for width in (dims.n_text_state, dims.n_text_ffn))


def in_blocks(weight: Any) -> Any:
    """Copy weight [n_out, n_in] into the order in which products read it.

    The inputs of one tile lie together for a block of outputs. In 16 bits each output has a row of
    64 bytes: [n_out / 64, n_in / 32, 64, 32]. For 8 bits see `in_int8_blocks`.
    """
    if weight.itemsize == 1:
        return in_int8_blocks(weight)
    n_inputs = TILE_ROW_BYTES // weight.itemsize
    blocks = weight.reshape(-1, BLOCK_OUTPUTS, weight.shape[1] // n_inputs, n_inputs)
    return np.ascontiguousarray(blocks.swapaxes(1, 2))


def in_int8_blocks(weight: Any) -> Any:
    """Like `in_blocks` in 8 bits: [n_out / 64, n_in / 64, 64, 64], padded with zeros behind n_out.

    A block has four tiles of 16 outputs. A tile's row has four inputs of every output, so that sums
    lie side by side.
    """
    n_out, n_in = weight.shape
    padded = np.zeros((-(-n_out // BLOCK_OUTPUTS) * BLOCK_OUTPUTS, n_in), weight.dtype)
    padded[:n_out] = weight
    tiles = padded.reshape(
        -1, TILES_OF_BLOCK, TILE_ROWS, n_in // TILE_ROW_BYTES, TILE_ROWS, INPUTS_OF_GROUP
    )
    blocks = tiles.transpose(0, 3, 1, 4, 2, 5)  # block, its inputs, tile, group, output, input
    return np.ascontiguousarray(blocks).reshape(
        -1, n_in // TILE_ROW_BYTES, BLOCK_OUTPUTS, TILE_ROW_BYTES
    )
