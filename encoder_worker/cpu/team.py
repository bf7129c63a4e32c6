"""The encoder on a CPU's cores: threads that share out the rows of windows.

Every thread takes some rows of a window, and does with them by single-threaded products all that a
layer does; only then, where keys and values of all rows must stand, does the window's next layer
begin. A thread that finds nothing to do in the first window goes on with the next one, so cores
idle only where one window is all there is, or for an urgent one: it goes before the others at the
next unit, and the threads that it needs wait for its next layer. A product by a thread pool's fork
and join instead, a dozen each layer, costs a third more on two cores, and far more where another
process has one.

A unit of rows is always computed alike, so a window's result does not depend on who took it, nor on
what else there is. What a unit is depends on whether there are more than two threads.
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

DTYPES = (torch.float32, torch.bfloat16)  # that there are kernels for

UNITS = 4  # of a window whose units hold at least so much each, where there are cores to share it
LEAST_UNITS = 2  # of any: each unit begins its own products, and reads all weights for them
UNIT_VALUES = 1 << 15  # rows times width; with less, beginning the products takes most of the time

Sink = Callable[[Tensor, int], None]  # takes states [n, d] of rows from an index on


def team_kernels(dtype: torch.dtype, *, int8: bool = False) -> TeamKernels | None:
    """Those of an encoder that computes in `dtype`, one of DTYPES; None where none compile."""
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
    """`AudioEncoder` on CPU threads of its own. May be called from any thread."""

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
        self._idle: list[_Memory] = []  # used again
        self._closing = False
        self._threads = [
            threading.Thread(target=self._main, name=f"encoder-team-{index}", daemon=True)
            for index in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, mel: Tensor, sink: Sink, *, is_urgent: bool = False) -> Future[None]:
        """Encode mel [1, n_mels, 2 * T], in any dtype; T up to the checkpoint's positions.

        sink: called on the team's threads, with each row once, in units. is_urgent: before all that
        are not, unless these were passed by too often. The future is done when all rows are; it
        fails with what a thread raised, after which no thread is at it.
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
        """End the threads after what was submitted."""
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
        """A unit of the first window that has one to give; None when the team is closed."""
        with self._changed:
            while True:
                for window in self._able():
                    if (unit := window.take()) is not None:
                        return window, unit
                if self._closing and not self._windows:
                    return None
                self._changed.wait()

    def _able(self) -> list[_Window]:
        """Those that a thread may work on: others only with threads that no urgent unit needs."""
        if not self._windows or not self._windows[0].is_urgent:
            return self._windows
        urgent = [window for window in self._windows if window.is_urgent]
        n_elsewhere = sum(window.n_running for window in self._windows if not window.is_urgent)
        n_left_over = len(self._threads) - len(urgent[0].memory.units)
        return self._windows if n_elsewhere < n_left_over else urgent

    def _finish(self, window: _Window) -> None:
        """A unit is done. The last of a layer begins the next one, or ends the window."""
        with self._changed:
            window.n_running -= 1
            if window.n_running or (window.n_left and window.error is None):
                return
        # No other thread is at this window now.
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
        """A layer's keys and values, which all stand now, as the attention takes them."""
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
        """Convolutions and positions, and the first layer's queries, keys and values."""
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
    """What a window needs while it is encoded, for as many positions as there can be.

    n: the window's positions, set by `lay_out` with what follows from it. units: begin and end. x:
    the residual stream, float32 [n, d]. q: of each unit [H, its rows, Dh]. k, v: keys and values of
    layers, [2, H, T, Dh], as the attention asks for them (T, and how v lies): while some attend
    with one layer's, others write the next one's. laid_out: what the attention made of a layer's.
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
    """The rows of a window of `n` positions, cut into an even number of units of about a size.

    Of at most `most_rows` rows each for one or two threads, and of at most `ROWS` for more. These
    share a short window's too, unless its units would be too small: for them 320 positions make 4
    units of 80 rows in a model 512 wide, and 2 of 160 in one 192 wide.
    """
    is_shared = n_threads > LEAST_UNITS and n * d >= UNITS * UNIT_VALUES
    least = UNITS if is_shared else LEAST_UNITS
    most = most_rows if n_threads <= LEAST_UNITS else ROWS
    n_units = max(2 * -(-n // (2 * most)), least)
    bounds = [n * unit // n_units for unit in range(n_units + 1)]
    return list(itertools.pairwise(bounds))


class _Window:
    """One window's state; the team's lock guards it.

    layer: of the units that are taken now; 0 are those before the first layer. n_passed_by: urgent
    windows that came later and went before it.
    """

    def __init__(self, memory: _Memory, mel: Tensor, sink: Sink, *, is_urgent: bool) -> None:
        self.memory, self.mel, self.sink = memory, mel, sink
        self.is_urgent, self.n_passed_by = is_urgent, 0
        self.alike = positions_alike(mel)
        self.future: Future[None] = Future()
        self.error: BaseException | None = None
        self.begin_layer(0)

    def begin_layer(self, layer: int) -> None:
        self.layer = layer
        self.n_left = len(self.memory.units)
        self.n_running = 0

    def may_be_passed_by(self) -> bool:
        """Whether an urgent one may go before it: none starves."""
        return not self.is_urgent and self.n_passed_by < PASSED_BY["later"]

    def take(self) -> int | None:
        if self.error is not None or not self.n_left:
            return None
        self.n_left -= 1
        self.n_running += 1
        return self.n_left
