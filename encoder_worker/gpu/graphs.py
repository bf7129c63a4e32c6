"""A computation at fixed shapes, each captured as one CUDA graph.

A shape is a number of windows and a number of encoder positions. Knows no model. What it runs reads
and writes tensors that stay where they are, so that a replay needs no arguments; a batch takes the
smallest shape that holds it, and what fills it up must be inert.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
<<<<<<< Updated upstream
from dataclasses import dataclass
=======
from functools import partial
>>>>>>> Stashed changes

import torch

from cluster.model.streams import Body, capture, new_graph_memory, on_stream, warm_up

logger = logging.getLogger(__name__)

<<<<<<< Updated upstream
EVERY_SIZE_TO = 16  # five windows in a graph for eight would cost as much as eight
WARM_UPS = 2  # plans, workspaces and kernels are made by the first runs, which must not be captured
=======
SIZES = (1, 2, 4, 8, 16)
>>>>>>> Stashed changes


@dataclass(frozen=True, slots=True, order=True)
class BatchShape:
    """Windows in a batch, and the encoder positions of each."""

    positions: int
    windows: int


Run = Callable[[BatchShape], None]


def sizes_up_to(max_batch: int) -> tuple[int, ...]:
    """The batch sizes that graphs are made for: each one, and above 16 steps of at most an eighth.

    Example: 24 gives 1 to 16, 18, 20, 22 and 24.
    """
    sizes = list(range(1, min(max_batch, EVERY_SIZE_TO) + 1))
    while sizes[-1] < max_batch:
        sizes.append(min(max_batch, sizes[-1] + sizes[-1] // 8))
    return tuple(sizes)


class BatchGraphs:
    """`run` at each shape; eagerly on a CPU, where it is the reference."""

    def __init__(
        self,
        run: Run,
        sizes: Sequence[int],
        contexts: Sequence[int],
        stream: torch.cuda.Stream | None,
    ) -> None:
        """
        Args:
            sizes: numbers of windows; contexts: numbers of positions, each with every size.
            stream: where graphs are captured and replayed; None runs eagerly.
        """
        self._run = run
        self._sizes = tuple(sorted(sizes))
        self._contexts = tuple(sorted(contexts))
        self._stream = stream
<<<<<<< Updated upstream
        self._graphs: dict[BatchShape, torch.cuda.CUDAGraph] = {}
=======
        self._graphs: dict[int, Body] = {}
>>>>>>> Stashed changes

    @property
    def captured(self) -> tuple[BatchShape, ...]:
        """The shapes that are graphs."""
        return tuple(sorted(self._graphs))

    def shape_for(self, windows: int, positions: int) -> BatchShape:
        """The smallest size for so many windows. Positions stay: texts depend on how many."""
        return BatchShape(positions, next(size for size in self._sizes if size >= windows))

    def capture(self) -> None:
        """Capture every shape; what cannot be captured is run eagerly, and logged.

        The largest comes first: the others then live in its memory. They may share it, since
        they run one after another on one stream.
        """
        if self._stream is None:
            return
<<<<<<< Updated upstream
        memory = torch.cuda.graph_pool_handle()
        shapes = [BatchShape(n, size) for n in self._contexts for size in self._sizes]
        for shape in sorted(shapes, key=lambda s: s.windows * s.positions, reverse=True):
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    self._run(shape)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may allocate meanwhile: a decoder in the same process does.
                with torch.cuda.graph(
                    graph, pool=memory, stream=self._stream, capture_error_mode="thread_local"
                ):
                    self._run(shape)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                logger.warning("no CUDA graph for %s, which runs eagerly: %s", shape, error)
                continue
            self._graphs[shape] = graph

    def launch(self, shape: BatchShape) -> None:
        """Enqueue a batch on the current stream."""
        if graph := self._graphs.get(shape):
            graph.replay()
=======
        memory = new_graph_memory()
        for size in reversed(self._sizes):
            body = partial(self._run, size)
            with on_stream(self._stream):
                warm_up(body)
                try:
                    self._graphs[size] = capture(body, memory)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    logger.warning(
                        "no CUDA graph for batches of %d, they run eagerly: %s", size, error
                    )

    def launch(self, n: int) -> int:
        """Enqueue a batch of `n` on the current stream; the size that it was run at."""
        size = self.size_for(n)
        if graph := self._graphs.get(size):
            graph()
>>>>>>> Stashed changes
        else:
            self._run(shape)
