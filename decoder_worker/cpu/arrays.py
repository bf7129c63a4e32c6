"""What the compiled decoder reads and writes: stacked weights, plans, memory between phases, runs.

Tuples of arrays, as compiled code takes them; a dtype says how an element is stored: float32,
uint16 for the bits of a bfloat16, int8 with a scale. No numba.
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
OUTPUTS = HEAD_DIM  # of a product in one unit: a head
LOGITS = 256  # the same of the last product
N_DIMS_IN_ROWS = 3  # of a product's weights of all layers; in blocks there are two more
PIECE = 128  # most positions that one unit attends to; a window has 12 such

ROWS_OF_TILE = 8  # of x in one tile: each is a row of its upper and one of its lower halves

# Places in `Run.control`.
ENDED, LEFT, WAITED_BEFORE = range(3)

# The phases of a layer, in order.
QKV, SELF, SELF_OUT, CROSS_Q, CROSS, CROSS_OUT, FC1, FC2 = range(8)
N_PHASES = 8


class Kinds(NamedTuple):
    """What a decoder is compiled for: dtypes of weights, both pools and the head, and the layout.

    tiles, blocks: as in `stack_layers`. head_tiles: as in `Head`.
    """

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
    """One product of every layer, scale * (weight @ x) + bias.

    weight [L, n_out, n_in]: float32, uint16 or int8; or each layer's uint16 or int8 `in_blocks`.
    scale, bias: float32 [L, n_out].
    """

    weight: Any
    scale: Any
    bias: Any


class Layers(NamedTuple):
    """norms: float32 [3 * L + 1, 2, d], weight and bias of each in the order that they come.

    tiles: how products are computed, as `products_for` has it. By tiles every weight is uint16, or
    int8 in blocks; by vectors it is int8 in blocks.
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
    """weight [n_vocab, d]: float32, or int8, which is `in_blocks` for tiles and for vectors.

    scale: float32 [n_vocab]. tiles: how its products are computed, as `products_for` has it.
    """

    weight: Any
    scale: Any
    tiles: Any


class Pages(NamedTuple):
    """What rows attend to in one pool, [page, L, 2, page_size, H, HEAD_DIM].

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


class Embedding(NamedTuple):
    """tokens [n_vocab, d], positions [n_text_ctx, d]: float32, or the bits of bfloat16 as uint16.

    Their sum is rounded to that dtype.
    """

    tokens: Any
    positions: Any


class Choice(NamedTuple):
    """The rules of sampling, as `LogitRules` has them, and where slots keep what they remember.

    table: int64, the slots'. suppressed: float32 [n_vocab]. not_first: int64.
    """

    table: Any
    suppressed: Any
    not_first: Any
    marks: Any


class Run(NamedTuple):
    """One run of steps.

    slots: int64 [n]. tokens int64, logprobs float32: [most steps, n], what each step chose.
    logits: float32 [n, n_vocab], of the last step.
    control: int64 [3]. ENDED: the steps that were made, 0 while the run goes on; LEFT: whether a
        helper has left; WAITED_BEFORE: the team's counter of that name when the run began.
    interrupt: int64 [1], set by any thread: the run is to end with its step.
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
    """Of all layers, with one for each phase's conclusion and one for the start.

    units: int64 [N_PHASES], of each phase of a layer.
    """
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
    """weight float32 [n_vocab, d]: as it lies there, or in 8 bits, which `tiles` need."""
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
    """weight [n_out, n_in] as `Products` have it, and a scale for each output."""
    if int8:
        quantized, scale = quantize_rows(weight)
        return quantized.numpy(), scale.numpy()
    return as_array(weight), np.ones(len(weight), np.float32)


def new_run(slots: Any, most: int, logits: Any, interrupt: Any) -> Run:
    n = len(slots)
    tokens, logprobs = np.empty((most, n), np.int64), np.empty((most, n), np.float32)
    return Run(slots, tokens, logprobs, logits, np.zeros(3, np.int64), interrupt)


def step_units(units: Any, n_layer: int, n_rows: int, n_vocab: int) -> Any:
    """int64 [3]: units of a step's layers, of its head, and of all of it.

    A step has one unit to begin with, and one to choose each row's token.
    """
    layers, head = n_units(units, n_layer), n_head_units(n_vocab)
    return np.array([layers, head, 1 + layers + head + n_rows], np.int64)


def fits_tiles(dims: ModelDims) -> bool:
    """Whether whole tiles make up every product of the decoder's layers.

    The head, which is of 8 bits where there are tiles, may end within one.
    """
    return all(width % BLOCK_OUTPUTS == 0 for width in (dims.n_text_state, dims.n_text_ffn))


def in_blocks(weight: Any) -> Any:
    """A copy of weight [n_out, n_in] in the order in which products read it.

    What a block of outputs needs of the inputs of one tile lies together. Of 16 bits each output's
    are a row of 64 bytes: [n_out / 64, n_in / 32, 64, 32]. Of 8 bits see `in_int8_blocks`.
    """
    if weight.itemsize == 1:
        return in_int8_blocks(weight)
    n_inputs = TILE_ROW_BYTES // weight.itemsize
    blocks = weight.reshape(-1, BLOCK_OUTPUTS, weight.shape[1] // n_inputs, n_inputs)
    return np.ascontiguousarray(blocks.swapaxes(1, 2))


def in_int8_blocks(weight: Any) -> Any:
    """The same of 8 bits: [n_out / 64, n_in / 64, 64, 64], where n_out may end within a block.

    Four tiles of 16 outputs each; a tile's row has four inputs of every output, so that its sums
    lie side by side. Behind the last output are zeros.
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
