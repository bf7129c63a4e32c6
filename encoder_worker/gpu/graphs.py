"""A computation at a few fixed batch sizes, each captured as one CUDA graph.

Knows no model. What it runs reads and writes tensors that stay where they are, so that a replay
needs no arguments; a batch takes the next larger size, and what fills it up must be inert.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16)
WARM_UPS = 2  # plans, workspaces and kernels are made by the first runs, which must not be captured

Run = Callable[[int], None]  # computes a batch of so many windows


def sizes_up_to(max_batch: int) -> tuple[int, ...]:
    """The batch sizes that graphs are made for: 6 gives 1, 2, 4, 6."""
    return (*(size for size in SIZES if size < max_batch), max_batch)


class BatchGraphs:
    """`run` at each of `sizes`; eagerly on a CPU, where it is the reference."""

    def __init__(self, run: Run, sizes: Sequence[int], stream: torch.cuda.Stream | None) -> None:
        """Args: stream: where graphs are captured and replayed; None runs eagerly."""
        self._run = run
        self._sizes = tuple(sorted(sizes))
        self._stream = stream
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @property
    def captured(self) -> tuple[int, ...]:
        """The sizes that are graphs."""
        return tuple(sorted(self._graphs))

    def size_for(self, n: int) -> int:
        """The smallest size that holds a batch of `n`."""
        return next(size for size in self._sizes if size >= n)

    def capture(self) -> None:
        """Capture every size; what cannot be captured is run eagerly, and logged.

        The largest comes first: the others then live in its memory. They may share it, since
        they run one after another on one stream.
        """
        if self._stream is None:
            return
        memory = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    self._run(size)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may allocate meanwhile: a decoder in the same process does.
                with torch.cuda.graph(
                    graph, pool=memory, stream=self._stream, capture_error_mode="thread_local"
                ):
                    self._run(size)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                logger.warning("no CUDA graph for batches of %d, they run eagerly: %s", size, error)
                continue
            self._graphs[size] = graph

    def launch(self, n: int) -> int:
        """Enqueue a batch of `n` on the current stream; the size that it was run at."""
        size = self.size_for(n)
        if graph := self._graphs.get(size):
            graph.replay()
        else:
            self._run(size)
        return size
