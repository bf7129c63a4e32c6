"""The encoder on a CPU's cores: rows of one window, shared out among threads.

Every thread runs single-threaded products on the rows that it takes next, and does with these rows
all that a layer does; two barriers a layer, at which keys and values of all rows must stand, are
all that threads wait for. A product by a thread pool's fork and join instead, a dozen each layer,
costs a third more on two cores, and far more where another process has one of them.

A unit of rows is always computed alike, so a window's result does not depend on who took it, nor
on what else is in its batch.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.model.jit import as_array
from cluster.model.layers import LayerNorm
from encoder_worker.model import AudioEncoder, EncoderLayer
from encoder_worker.team_kernels import TeamKernels

ROWS = 250  # a unit: its hidden rows (1 MB for base) stay in cache between products
MOST_UNITS = 6  # of a window of 1500 positions, and so the threads that one window keeps busy
SCORES_BYTES = 1 << 22  # of the heads that a unit attends with at a time
LOG2_E = 1.4426950408889634

Sink = Callable[[Tensor, int], None]  # takes states [n, d] of rows from an index on


class TeamEncoder:
    """`AudioEncoder` for batches of one and more on CPU threads of its own. For one caller."""

    def __init__(self, encoder: AudioEncoder, kernels: TeamKernels, n_threads: int) -> None:
        self._encoder = encoder
        self._kernels = kernels
        self._n_threads = n_threads
        self._pool = ThreadPoolExecutor(n_threads, "encoder-team", torch.set_num_threads, (1,))
        self._idle: list[_Window] = []  # their memory is used again

    def __call__(self, windows: Sequence[tuple[Tensor, Sink]]) -> None:
        """Encode windows, each mel [1, n_mels, 2 * T] with what its states go to, in units.

        Sinks are called on the team's threads, for each row once.
        """
        most = max(1, self._n_threads)
        for first in range(0, len(windows), most):
            together = windows[first : first + most]
            team = min(MOST_UNITS, most // len(together))
            futures: list[Future[None]] = []
            running = []
            for mel, sink in together:
                window = self._idle.pop() if self._idle else _Window(self._encoder, self._kernels)
                window.begin(mel, sink, team)
                running.append(window)
                futures += [self._pool.submit(window.run) for _ in range(team)]
            wait(futures)
            self._idle += running
            broken = [error for future in futures if (error := future.exception())]
            for error in broken:
                if not isinstance(error, threading.BrokenBarrierError):
                    raise error  # what the others' barrier broke of
            if broken:
                raise broken[0]

    def close(self) -> None:
        self._pool.shutdown()


class _Window:
    """One window's memory, and the work on it. `run` is called by every thread of its team."""

    def __init__(self, encoder: AudioEncoder, kernels: TeamKernels) -> None:
        self._encoder, self._kernels = encoder, kernels
        dims, dtype = encoder.dims, encoder.dtype
        self._n, self._d = dims.n_audio_ctx, dims.n_audio_state
        size = ROWS if self._n % ROWS == 0 else self._n
        self._units = [(begin, begin + size) for begin in range(0, self._n, size)]
        self._x = torch.empty(self._n, self._d)  # the residual stream
        n_head, head_dim = dims.n_audio_head, self._d // dims.n_audio_head
        self._q = [torch.empty(n_head, size, head_dim, dtype=dtype) for _ in self._units]
        # Keys and values of two layers: while some attend with one, others write the next.
        all_rows = (2, n_head, self._n, head_dim)
        self._k, self._v = torch.empty(all_rows, dtype=dtype), torch.empty(all_rows, dtype=dtype)
        self._key_sums = np.empty((len(self._units), self._d), dtype=np.float32)

    def begin(self, mel: Tensor, sink: Sink, team: int) -> None:
        self._mel, self._sink = mel.to(self._encoder.dtype), sink
        self._barrier = threading.Barrier(team)
        n_phases = 2 * len(self._encoder.layers) + 1
        self._taken = [itertools.count() for _ in range(n_phases)]

    def run(self) -> None:
        try:
            with torch.inference_mode():
                self._run()
        except BaseException:
            self._barrier.abort()
            raise

    def _run(self) -> None:
        layers = self._encoder.layers
        for unit in self._take(0):
            self._start(unit)
        for index in range(len(layers)):
            self._barrier.wait()
            mean = self._key_sums.sum(0) / np.float32(self._n)
            for unit in self._take(2 * index + 1):
                self._kernels.centre(as_array(self._k[index % 2]), *self._units[unit], mean)
            self._barrier.wait()
            for unit in self._take(2 * index + 2):
                self._layer(index, unit)

    def _take(self, phase: int) -> Iterator[int]:
        """Units that no other thread has taken; `next` of a count is atomic."""
        return itertools.takewhile(lambda unit: unit < len(self._units), self._taken[phase])

    def _start(self, unit: int) -> None:
        """Convolutions and positions, and the first layer's queries, keys and values."""
        begin, end = self._units[unit]
        x = self._x[begin:end]
        x.copy_(self._encoder.embed_rows(self._mel, begin, end))
        self._project(0, unit, self._encoder.layers[0].norm(x))

    def _project(self, index: int, unit: int, normed: Tensor) -> None:
        """Queries, keys and values of one layer, from its normed input [n, d]."""
        qkv = as_array(self._encoder.layers[index].qkv(normed))
        k, v = as_array(self._k[index % 2]), as_array(self._v[index % 2])
        q, sums = as_array(self._q[unit]), self._key_sums[unit]
        self._kernels.split(qkv, self._units[unit][0], q, k, v, sums)

    def _layer(self, index: int, unit: int) -> None:
        begin, end = self._units[unit]
        layer: EncoderLayer = self._encoder.layers[index]
        x = as_array(self._x[begin:end])
        normed = torch.empty(end - begin, self._d, dtype=self._encoder.dtype)
        attended = attend(self._kernels, self._q[unit], self._k[index % 2], self._v[index % 2])
        self._add_norm(x, layer.out(attended), layer.mlp.norm, normed)
        delta = layer.mlp.fc2(layer.mlp.fc1.gelu(normed))
        if index + 1 < len(self._encoder.layers):
            self._add_norm(x, delta, self._encoder.layers[index + 1].norm, normed)
            self._project(index + 1, unit, normed)
        else:
            self._add_norm(x, delta, self._encoder.norm, normed)
            self._sink(normed, begin)

    def _add_norm(self, x: Any, delta: Tensor, norm: LayerNorm, out: Tensor) -> None:
        self._kernels.add_norm(x, as_array(delta), *norm.arrays, as_array(out))


def attend(kernels: TeamKernels, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Some queries over all keys, on the calling thread: torch's kernel, or oneDNN's products.

    Torch's own takes no bfloat16 instructions without AMX. Of bfloat16 scores are rounded between
    the two products, so keys come centred: softmax does not see it, and what is rounded is smaller.

    Args:
        q, k, v: [H, n, Dh], [H, T, Dh] twice.

    Returns:
        [n, H * Dh] in their dtype.
    """
    if q.dtype == torch.float32:
        return F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
    n_head, n, head_dim = q.shape
    most = max(1, SCORES_BYTES // (n * k.shape[1] * q.itemsize))
    step = next(n_heads for n_heads in range(most, 0, -1) if n_head % n_heads == 0)
    scores, out = q.new_empty(step, n, k.shape[1]), q.new_empty(n, n_head * head_dim)
    sums = np.empty(step * n, dtype=np.float32)
    flat, columns, keys = as_array(scores.flatten(0, 1)), as_array(out), k.transpose(1, 2)
    for first in range(0, n_head, step):
        heads = slice(first, first + step)
        torch.bmm(q[heads], keys[heads], out=scores)
        kernels.softmax(flat, sums, np.float32(head_dim**-0.5 * LOG2_E))
        mixed = torch.bmm(scores, v[heads])
        kernels.join(as_array(mixed), sums, first, columns)
    return out
