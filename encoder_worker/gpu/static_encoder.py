"""From windows to pages on a GPU: upload, then mel, encoder, projection and scatter as a graph.

There is a CUDA graph for each number of windows and of positions, which reads its inputs from fixed
memory. A batch takes the smallest that holds it; rows without a window have no pages and write
nothing. On a CPU it runs eagerly, so that tests compare its results with the plain way's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cluster.common.kernels.gpu.operators import scatter_pages
from cluster.common.kernels.gpu.self_check import GRAPHS, is_right
from cluster.common.kv.cross_kv import WINDOWS_AT_ONCE, CrossKVProjection, Unprojected
from cluster.common.messages import FileMel
from cluster.common.model.streams import (
    Body,
    capture,
    new_event,
    new_graph_memory,
    on_stream,
    synchronize,
    warm_up,
)
from encoder_worker.gpu.encoder import Encoder
from encoder_worker.gpu.staging import Staging
from encoder_worker.mel import FixedLogMel, LogMel

# Fastest first on Hopper (cuDNN's fused attention, then FlashAttention 2). None is excluded, since
# the choice is process-wide and a decoder in this process may need another.
ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
EVERY_SIZE_TO = 16  # five windows in a graph for eight would cost as much as eight

# Returns when a launched batch is in its pages; raises what went wrong on the device.
Wait = Callable[[], None]


def already_done() -> None:
    """The `Wait` of a batch that was done when its launch returned."""


def waiter_for(stream: torch.cuda.Stream) -> Wait:
    """Waits for what was launched so far, without spinning and without the GIL."""
    event = new_event(blocking=True)
    event.record(stream)

    def wait() -> None:
        event.synchronize()

    return wait


class BatchShape(NamedTuple):
    positions: int  # of each window
    windows: int


def sizes_up_to(max_batch: int) -> list[int]:
    """Batch sizes of graphs: all up to 16, then in steps of at most an eighth.

    Example: 24 gives 1 to 16, 18, 20, 22 and 24.
    """
    sizes = list(range(1, min(max_batch, EVERY_SIZE_TO) + 1))
    while sizes[-1] < max_batch:
        sizes.append(min(max_batch, sizes[-1] + sizes[-1] // 8))
    return sizes


class StaticEncoder:
    """Bound to one pool; for one thread."""

    def __init__(
        self,
        mel: LogMel,
        encoder: Encoder,
        projection: CrossKVProjection | Unprojected,
        pool: Tensor,
        max_batch: int,
        stream: torch.cuda.Stream | None = None,
        contexts: Sequence[int] = (),
    ) -> None:
        """Capture a graph for each batch size up to `max_batch`, with each context.

        pool: [n_pages, L, 2, page_frames, H, Dh], which must outlive this. stream: where graphs are
        captured and replayed; None on a CPU. contexts: encoder positions that windows may have,
        beside n_audio_ctx.
        """
        self._mel = FixedLogMel(mel)
        self._encoder = encoder
        self._projection = projection
        self._pool = pool
        self._full = encoder.dims.n_audio_ctx
        self._staging = Staging(max_batch, -(-self._full // pool.shape[3]), pool.device)
        self._stream = stream
        self._sizes = sizes_up_to(max_batch)
        every = sorted({*contexts, self._full})
        self.shapes = [BatchShape(n, size) for n in every for size in self._sizes]
        # Of the shapes that could be captured; the others run eagerly.
        self.graphs: dict[BatchShape, Body] = {}
        if stream is not None:
            synchronize(pool.device)  # weights were loaded on another stream
            with torch.inference_mode(), sdpa_kernel(ATTENTION, set_priority=True):
                if not is_right(GRAPHS, partial(self._capture, stream), list):
                    self.graphs.clear()

    @torch.inference_mode()
    def __call__(
        self,
        windows: Sequence[NDArray[Any]],
        pages: Sequence[Sequence[int]],
        file_mels: Sequence[FileMel | None] | None = None,
        context: int = 0,
    ) -> Wait:
        """Launch a batch of at most `max_batch` windows; arguments as `WindowEncoder`'s."""
        slices = [None] * len(windows) if file_mels is None else file_mels
        shape = self.shape_for(len(windows), context or self._full)
        with on_stream(self._stream):
            self._staging.put(windows, pages, slices, shape.windows)
            self.graphs.get(shape, partial(self._compute, shape))()
        return already_done if self._stream is None else waiter_for(self._stream)

    def shape_for(self, windows: int, positions: int) -> BatchShape:
        """The smallest size for so many windows; positions stay, since texts depend on them."""
        return BatchShape(positions, next(size for size in self._sizes if size >= windows))

    def _capture(self, stream: torch.cuda.Stream) -> list[Tensor]:
        """Capture every shape in one memory, the largest first: they run one after another."""
        memory = new_graph_memory()
        for shape in sorted(self.shapes, key=lambda s: s.windows * s.positions, reverse=True):
            body = partial(self._compute, shape)
            with on_stream(stream):
                warm_up(body)
                self.graphs[shape] = capture(body, memory)
        return []

    def _compute(self, shape: BatchShape) -> None:
        inputs = self._staging.inputs.first(shape.windows)
        mel = self._mel(inputs.pcm, inputs.marks)[:, :, : 2 * shape.positions]
        states = self._encoder(mel)
        n_pages = -(-shape.positions // self._pool.shape[3])
        table = inputs.pages[:, :n_pages].contiguous()
        for begin in range(0, shape.windows, WINDOWS_AT_ONCE):
            part = slice(begin, begin + WINDOWS_AT_ONCE)
            scatter_pages(self._projection.project(states[part]), self._pool, table[part])
