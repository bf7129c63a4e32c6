"""The decoder's kernels, compiled or loaded. Imports numba only when they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cluster.common.kernels.cpu.cache import ensure_jit_cache
from cluster.common.kernels.cpu.machine_code import built
from cluster.common.kernels.cpu.tile_registers import products_for
from decoder_worker.cpu.arrays import Kinds

if TYPE_CHECKING:
    from decoder_worker.cpu.step_kernels import DecoderKernels


def decoder_kernels(kinds: Kinds) -> DecoderKernels | None:
    """Compile or load; None if they do not compile."""
    return built("decoder", str(kinds), partial(_build_decoder, kinds))


def all_kinds(*, bfloat16: bool, int8: bool) -> tuple[Kinds, ...]:
    """The kinds of all decoders; the cross pool has the self pool's dtype, or float8."""
    own = np.uint16 if bfloat16 else np.float32
    weight = np.int8 if int8 else own
    tiles = products_for(bfloat16=bfloat16, int8=int8)
    head = np.int8 if bfloat16 else weight
    head_tiles = products_for(bfloat16=bfloat16, int8=bfloat16 or int8)
    # Both for tiles: the weights of a large model stay in rows, which torch reads as well, except
    # in 8 bits.
    layouts = (False,) if tiles is None else (True,) if int8 else (True, False)
    return tuple(
        Kinds(weight, own, cross, head, tiles, blocks, head_tiles)
        for cross in (own, np.uint8)
        for blocks in layouts
    )


def _build_decoder(kinds: Kinds) -> DecoderKernels:
    from decoder_worker.cpu.step_kernels import build

    path_finder()
    return build(kinds)


@cache
def path_finder() -> Callable[[NDArray[np.float32]], NDArray[np.int64]]:
    """Compile or load `warping.first_columns`. On a GPU nothing else uses numba."""
    ensure_jit_cache()
    from decoder_worker.cpu.warping import first_columns

    found: Callable[[NDArray[np.float32]], NDArray[np.int64]] = first_columns
    found(np.zeros((1, 1), np.float32))
    return found
