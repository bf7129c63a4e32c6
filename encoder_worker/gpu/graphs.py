"""A computation at fixed shapes, each captured as one CUDA graph.

A shape is a number of windows and a number of encoder positions. Knows no model. What it runs reads
and writes tensors that stay where they are, so that a replay needs no arguments; a batch takes the
smallest shape that holds it, and what fills it up must be inert.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cluster.common.model.streams import Body, capture, new_graph_memory, on_stream, warm_up

logger = logging.getLogger(__name__)

EVERY_SIZE_TO = 16  # five windows in a graph for eight would cost as much as eight


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
        self._graphs: dict[BatchShape, Body] = {}

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
        memory = new_graph_memory()
        shapes = [BatchShape(n, size) for n in self._contexts for size in self._sizes]
        for shape in sorted(shapes, key=lambda s: s.windows * s.positions, reverse=True):
            body = partial(self._run, shape)
            with on_stream(self._stream):
                warm_up(body)
                try:
                    self._graphs[shape] = capture(body, memory)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    logger.warning("no CUDA graph for %s, it runs eagerly: %s", shape, error)

    def launch(self, shape: BatchShape) -> None:
        """Enqueue a batch on the current stream."""
        if graph := self._graphs.get(shape):
            graph()
        else:
            self._run(shape)
