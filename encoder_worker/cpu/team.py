"""The encoder on a CPU: threads that share out the rows of windows.

A thread computes a layer for some rows (a unit) of a window by single-threaded products. The
window's next layer begins when the keys and values of all its rows are there; meanwhile threads
work on other windows, urgent ones first. Products on a thread pool take a third more on two cores.

A unit is always computed in the same way, so a result depends neither on the thread that computed
it nor on other windows; how large units are depends on whether there are more than two threads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cluster.common.kernels.cpu.machine_code import as_array, built
from cluster.common.kernels.cpu.tile_registers import VECTORS, has_bfloat16_tiles, products_for
from cluster.common.priorities import PASSED_BY
from encoder_worker.cpu.products import ROWS, Attention, make_attention, make_products
from encoder_worker.model import AudioEncoder, positions_alike

if TYPE_CHECKING:
    from encoder_worker.cpu.team_kernels import TeamKernels

DTYPES = (torch.float32, torch.bfloat16)  # that have kernels

UNITS = 4  # at least, of a window that more than two threads share
LEAST_UNITS = 2  # at least, of any window: each unit reads all weights
UNIT_VALUES = 1 << 15  # rows times width; with less, starting the products takes most of the time

Sink = Callable[[Tensor, int], None]  # takes states [n, d] and the position of the first


def team_kernels(dtype: torch.dtype, *, int8: bool = False) -> TeamKernels | None:
    """Kernels of an encoder that computes in `dtype`, one of DTYPES; None if none compile."""
    own = np.uint16 if dtype == torch.bfloat16 else np.float32
    is_bfloat16 = dtype == torch.bfloat16
    tiles = is_bfloat16 and has_bfloat16_tiles()
    in_8_bits = products_for(bfloat16=is_bfloat16, int8=int8 or is_bfloat16) is VECTORS
    ways = {"tiles": tiles, "int8": int8, "vectors": in_8_bits}
    name = " ".join([own.__name__, *(way for way, has in ways.items() if has)])
    build = partial(_build, own, tiles=tiles, int8=int8, in_8_bits=in_8_bits)
    return built("encoder", name, build)


def _build(own: Any, **ways: bool) -> TeamKernels:
    from encoder_worker.cpu.team_kernels import build

    return build(own, **ways)


class TeamEncoder:
    """`AudioEncoder` on CPU threads of its own; thread-safe."""

    def __init__(
        self,
        encoder: AudioEncoder,
        kernels: TeamKernels,
        n_threads: int,
    ) -> None:
        self._encoder = encoder
        self._kernels = kernels
        dims = encoder.dims
        head_dim = dims.n_audio_state // dims.n_audio_head
        self._attend = make_attention(kernels, head_dim)
        self._products = make_products(encoder, kernels)
        self._changed = threading.Condition()  # guards the windows and the next three
        self._windows: list[_Window] = []  # not yet done, in order
        self._idle: list[_Memory] = []  # to be used again
        self._closing = False
        self._threads = [
            threading.Thread(target=self._main, name=f"encoder-team-{index}", daemon=True)
            for index in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, mel: Tensor, sink: Sink, *, is_urgent: bool = False) -> Future[None]:
        """Encode mel [1, n_mels, 2 * T] of any dtype; T up to the checkpoint's positions.

        sink: called on the team's threads, once for each unit. is_urgent: goes before windows that
        are not, unless those were passed by too often. The future is done when all rows are; it
        fails with what a thread raised, once no thread works on the window.
        """
        with self._changed:
            memory = self._idle.pop() if self._idle else self._new_memory()
            memory.lay_out(mel.shape[2] // 2)
            window = _Window(memory, mel.to(self._encoder.dtype), sink, is_urgent=is_urgent)
            place = len(self._windows)
            while is_urgent and place and self._windows[place - 1].may_be_passed_by():
                place -= 1
                self._windows[place].n_passed_by += 1
            self._windows.insert(place, window)
            self._changed.notify_all()
        return window.future

    def close(self) -> None:
        """End the threads once all submitted windows are done."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _new_memory(self) -> _Memory:
        n_threads, most_rows = len(self._threads), self._products.most_rows
        return _Memory(self._encoder, self._attend, n_threads, most_rows)

    def _main(self) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            while (taken := self._take()) is not None:
                window, unit = taken
                try:
                    self._run(window, unit)
                except BaseException as error:
                    window.error = window.error or error
                self._finish(window)

    def _take(self) -> tuple[_Window, int] | None:
        """Wait for a unit of the first window that has one; None when the team is closed."""
        with self._changed:
            while True:
                for window in self._able():
                    if (unit := window.take()) is not None:
                        return window, unit
                if self._closing and not self._windows:
                    return None
                self._changed.wait()

    def _able(self) -> list[_Window]:
        """Windows to work on; only urgent ones while their units need the other threads."""
        if not self._windows or not self._windows[0].is_urgent:
            return self._windows
        urgent = [window for window in self._windows if window.is_urgent]
        n_elsewhere = sum(window.n_running for window in self._windows if not window.is_urgent)
        n_left_over = len(self._threads) - len(urgent[0].memory.units)
        return self._windows if n_elsewhere < n_left_over else urgent

    def _finish(self, window: _Window) -> None:
        """Count a unit as done; a layer's last one begins the next layer or ends the window."""
        with self._changed:
            window.n_running -= 1
            if window.n_running or (window.n_left and window.error is None):
                return
        # No other thread works on this window now.
        if window.error is None and window.layer < len(self._encoder.layers):
            try:
                self._lay_out(window)
            except BaseException as error:
                window.error = error
            else:
                with self._changed:
                    window.begin_layer(window.layer + 1)
                    self._changed.notify_all()
                return
        with self._changed:
            self._windows.remove(window)
            self._idle.append(window.memory)
            self._changed.notify_all()
        if window.error is not None:
            window.future.set_exception(window.error)
        else:
            window.future.set_result(None)

    def _lay_out(self, window: _Window) -> None:
        memory = window.memory
        k, v = memory.k[window.layer % 2], memory.v[window.layer % 2]
        if self._attend.centres_keys:
            mean = memory.key_sums[: len(memory.units)].sum(0) / np.float32(memory.n)
            self._kernels.centre(as_array(k), 0, memory.n, mean)
        memory.laid_out = self._attend.lay_out(k, v, memory.n)

    def _run(self, window: _Window, unit: int) -> None:
        if window.layer:
            self._layer(window, window.layer - 1, unit)
        else:
            self._start(window, unit)

    def _start(self, window: _Window, unit: int) -> None:
        """Compute convolutions and positions, then the first layer's queries, keys and values."""
        begin, end = window.memory.units[unit]
        x = window.memory.x[begin:end]
        x.copy_(self._encoder.embed_rows(window.mel, begin, end, window.alike))
        self._project(window, 0, unit, self._products.begin(x))

    def _project(self, window: _Window, index: int, unit: int, normed: Any) -> None:
        memory = window.memory
        k, v = as_array(memory.k[index % 2]), as_array(memory.v[index % 2])
        q, sums = as_array(memory.q[unit]), memory.key_sums[unit]
        self._products.project(index, normed, memory.units[unit][0], q, k, v, sums)

    def _layer(self, window: _Window, index: int, unit: int) -> None:
        memory = window.memory
        begin, end = memory.units[unit]
        x = memory.x[begin:end]
        keys, values = memory.k[index % 2], memory.v[index % 2]
        attended = self._attend(memory.q[unit], keys, values, memory.n, memory.laid_out)
        if index + 1 < len(self._encoder.layers):
            normed = self._products.layer(index, x, attended)
            self._project(window, index + 1, unit, normed)
        else:
            window.sink(self._products.last_layer(x, attended), begin)


class _Memory:
    """Buffers for one window; `lay_out` makes views for its number of positions.

    n: positions. units: (begin, end) of each. x: the residual stream, float32 [n, d].
    q: of each unit [H, its rows, Dh].
    k, v: [2, H, T, Dh], in the layout that the attention wants: while one layer's are read, the
        next layer's are written.
    laid_out: what the attention made of one layer's keys and values.
    """

    def __init__(
        self, encoder: AudioEncoder, attention: Attention, n_threads: int, most_rows: int
    ) -> None:
        self._n_threads, self._most_rows = n_threads, most_rows
        dims, dtype = encoder.dims, encoder.dtype
        self.d, self._n_head = dims.n_audio_state, dims.n_audio_head
        self._multiple, self._values_by_dim = attention.key_multiple, attention.values_by_dim
        most = dims.n_audio_ctx
        self._x = torch.empty(most * self.d)
        self._q = torch.empty(most * self.d, dtype=dtype)
        room = 2 * self._room_for(most) * self.d
        self._k, self._v = (torch.empty(room, dtype=dtype) for _ in range(2))
        n_units = len(units_of(most, self.d, n_threads, most_rows))
        self.key_sums = np.empty((n_units, self.d), dtype=np.float32)
        self.laid_out: Any = None
        self.lay_out(most)

    def lay_out(self, n: int) -> None:
        self.n, d, n_head = n, self.d, self._n_head
        head_dim, room = d // n_head, self._room_for(n)
        self.units = units_of(n, d, self._n_threads, self._most_rows)
        self.x = self._x[: n * d].view(n, d)
        self.q = [self._q[b * d : e * d].view(n_head, e - b, head_dim) for b, e in self.units]
        k, v = (flat[: 2 * room * d] for flat in (self._k, self._v))
        self.k = k.view(2, n_head, room, head_dim)
        if self._values_by_dim:
            self.v = v.view(2, n_head, head_dim, room).transpose(2, 3)
        else:
            self.v = v.view(2, n_head, room, head_dim)
        for each in (self.k, self.v):
            each[:, :, n:] = 0

    def _room_for(self, n: int) -> int:
        return -(-n // self._multiple) * self._multiple


def units_of(n: int, d: int, n_threads: int, most_rows: int = ROWS) -> list[tuple[int, int]]:
    """Split the rows of `n` positions into an even number of units of about equal size.

    Units have at most `most_rows` rows for up to two threads, and at most `ROWS` for more. More
    threads also share a short window: 320 positions make 4 units of 80 rows at width 512, but 2 of
    160 at width 192, where smaller ones would be too small.
    """
    is_shared = n_threads > LEAST_UNITS and n * d >= UNITS * UNIT_VALUES
    least = UNITS if is_shared else LEAST_UNITS
    most = most_rows if n_threads <= LEAST_UNITS else ROWS
    n_units = max(2 * -(-n // (2 * most)), least)
    bounds = [n * unit // n_units for unit in range(n_units + 1)]
    return list(itertools.pairwise(bounds))


class _Window:
    """State of one window, guarded by the team's lock."""

    def __init__(self, memory: _Memory, mel: Tensor, sink: Sink, *, is_urgent: bool) -> None:
        self.memory, self.mel, self.sink = memory, mel, sink
        self.is_urgent, self.n_passed_by = is_urgent, 0  # by later but urgent windows
        self.alike = positions_alike(mel)
        self.future: Future[None] = Future()
        self.error: BaseException | None = None
        self.begin_layer(0)

    def begin_layer(self, layer: int) -> None:
        self.layer = layer  # whose units are taken; 0: the work before the first layer
        self.n_left = len(self.memory.units)
        self.n_running = 0

    def may_be_passed_by(self) -> bool:
        """Whether an urgent window may go before this one, which must not starve."""
        return not self.is_urgent and self.n_passed_by < PASSED_BY["later"]

    def take(self) -> int | None:
        if self.error is not None or not self.n_left:
            return None
        self.n_left -= 1
        self.n_running += 1
        return self.n_left
