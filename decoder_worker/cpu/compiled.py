"""The decoder's kernels as a worker asks for them. Imports numba only where they are built.

A dtype is NumPy's of what lies in memory: uint16 for the bits of a bfloat16, int16 for those of a
float16, uint8 for those of a float8_e4m3fn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.common.kernels.cpu.background import InBackground
from cluster.common.kernels.cpu.tile_registers import has_bfloat16_tiles, tile_config

if TYPE_CHECKING:
    from decoder_worker.cpu.attention_kernels import AttentionKernels
    from decoder_worker.cpu.fused_kernels import FusedKernels
from pathlib import Path


def attention_kernels(own: Any, cross: Any) -> InBackground[AttentionKernels]:
    """Over two pools of these dtypes; begins to build them."""
    build = partial(_build_attention, own, cross)
    return InBackground("decoder attention", build, KERNEL_SOURCES, _named(own, cross))


def layer_kernels(
    weight: Any, own: Any, cross: Any, head: Any, tiles: Any = None, blocks: bool = False
) -> InBackground[FusedKernels]:
    """Of weights, two pools and a head of these dtypes; begins to build them.

    tiles, blocks: as in `fused_arrays.stack_layers`.
    """
    build = partial(_build_layers, weight, own, cross, head, tiles, blocks)
    name = _layers_named(weight, own, cross, head, tiles=tiles, blocks=blocks)
    return InBackground("decoder layers", build, KERNEL_SOURCES, name)


def step_kernels(
    weight: Any,
    own: Any,
    cross: Any,
    head: Any,
    tiles: Any = None,
    blocks: bool = False,
    has_coarse: bool = False,
) -> InBackground[Callable[..., None]]:
    """Several steps in one, of what `layer_kernels` is of; begins to build them.

    has_coarse: whether a coarse head comes with a head of 16 bits.
    """
    build = partial(_build_steps, weight, own, cross, head, tiles, blocks, has_coarse)
    name = _layers_named(weight, own, cross, head, tiles=tiles, blocks=blocks)
    name += " coarse" if has_coarse else ""
    return InBackground("decoder steps", build, KERNEL_SOURCES, name)


def sampling_kernel() -> InBackground[Callable[..., None]]:
    """Begins to build it."""
    return InBackground("decoder sampling", _build_sampling, KERNEL_SOURCES)


def all_builds(*, bfloat16: bool, int8: bool) -> tuple[Callable[[], InBackground[Any]], ...]:
    """What begins each build of a decoder that computes in bfloat16 or float32.

    Its own pool has the dtype that it computes in; that of cross-attention KV has the same, or
    float8 (`kv_dtype`).

    Args:
        int8: its weights are held in 8 bits.
    """
    own = np.uint16 if bfloat16 else np.float32
    weight = np.int8 if int8 else own
    tiles = tile_config() if bfloat16 and has_bfloat16_tiles() else None
    head = np.int16 if bfloat16 and not int8 and tiles is None else weight
    # Of tiles both: the weights of a large model stay in rows, which torch reads as well, but for
    # those in 8 bits, which it does not read.
    layouts = (False,) if tiles is None else (True,) if int8 else (True, False)
    kinds = (own, np.uint8)
    # Small vocabularies, such as the bundled model's, have no coarse head.
    heads = (True, False) if np.dtype(head).itemsize == 2 else (False,)
    steps: list[Callable[..., InBackground[Any]]]
    steps = [partial(step_kernels, has_coarse=has_coarse) for has_coarse in heads]
    return (
        sampling_kernel,
        *(partial(attention_kernels, own, cross) for cross in kinds),
        *(
            partial(kernels, weight, own, cross, head, tiles, blocks)
            for cross in kinds
            for blocks in layouts
            for kernels in [layer_kernels, *steps]
        ),
    )


def _named(*dtypes: Any) -> str:
    return " ".join(dtype.__name__ for dtype in dtypes)


def _layers_named(*dtypes: Any, tiles: Any, blocks: bool) -> str:
    layout = "" if tiles is None else " tiles in blocks" if blocks else " tiles"
    return _named(*dtypes) + layout


def _build_attention(*dtypes: Any) -> AttentionKernels:
    from decoder_worker.cpu.attention_kernels import build

    return build(*dtypes)


def _build_layers(*dtypes_and_layout: Any) -> FusedKernels:
    from decoder_worker.cpu.fused_kernels import build

    return build(*dtypes_and_layout)


def _build_steps(*dtypes_and_layout: Any) -> Callable[..., None]:
    from decoder_worker.cpu.several.kernels import build

    return build(*dtypes_and_layout)


def _build_sampling() -> Callable[..., None]:
    from decoder_worker.cpu.sampling_kernels import build

    return build()


_FOLDER = Path(__file__).resolve().parent
KERNEL_SOURCES = (
    _FOLDER / "attention_kernels.py",
    _FOLDER / "attention_parts.py",
    _FOLDER / "attention_vectors.py",
    _FOLDER / "coarse_head.py",
    _FOLDER / "fused_arrays.py",
    _FOLDER / "fused_kernels.py",
    _FOLDER / "fused_parts.py",
    _FOLDER / "int8_products.py",
    _FOLDER / "likely_logits.py",
    _FOLDER / "sampling_kernels.py",
    _FOLDER / "several" / "arrays.py",
    _FOLDER / "several" / "kernels.py",
    _FOLDER / "step_team.py",
    _FOLDER / "tile_products.py",
    _FOLDER / "tile_blocks.py",
    _FOLDER / "work_sharing.py",
    _FOLDER.parent / "sampling" / "slots.py",
)
