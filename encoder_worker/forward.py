"""From windows of PCM to pages: mel, encoder and projection on one device.

Pages get the cross K/V of all layers or, where the decoder projects, the encoder's states. A call
launches the computation on a GPU, or on the threads of `cpu.team`; where that team's kernels do not
compile, the call itself computes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.common.kernels.gpu.kernels import has_triton
from cluster.common.kernels.gpu.operators import scatters
from cluster.common.kv.cross_kv import (
    CrossKVProjection,
    Unprojected,
    as_kv_pool,
    is_packed,
    packed_page,
)
from cluster.common.messages import FileMel, Payload
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.encoder_context import FULL, MEL_PER_POSITION
from cluster.common.model.kv_scales import kv_scales
from cluster.common.model.streams import (
    ENCODE_PRIORITY,
    default_stream,
    new_stream,
    on_stream,
)
from cluster.common.model.weights import TORCH_DTYPES
from encoder_worker.cpu.team import DTYPES, TeamEncoder, team_kernels
from encoder_worker.gpu.encoder import Encoder, fastest
from encoder_worker.gpu.static_encoder import (
    StaticEncoder,
    Wait,
    already_done,
    waiter_for,
)
from encoder_worker.mel import LogMel
from encoder_worker.model import AudioEncoder

if TYPE_CHECKING:
    from encoder_worker.cpu.team_kernels import TeamKernels

logger = logging.getLogger(__name__)


class WindowEncoder:
    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        device: str,
        *,
        payload: Payload = "cross_kv",  # what is written to pages
        int8: bool = False,  # hold the weights in 8 bits (CPU)
        contexts: Sequence[int] = (),  # positions below the full number; on a GPU with graphs
        kv_dtype: torch.dtype | None = None,  # of the pool for K/V
    ) -> None:
        """Load onto `device` ("cpu" or "cuda"); `dtype` is a key of TORCH_DTYPES."""
        torch_dtype = TORCH_DTYPES[dtype]
        self.device = device
        self.dtype = dtype
        self._dims = checkpoint.dims
        self._contexts = contexts
        self._mel = LogMel(checkpoint.dims.n_mels, device)
        self._plain = AudioEncoder(checkpoint, torch_dtype, device, int8=int8)
        self._encoder: Encoder = self._plain
        if device == "cuda":
            self._encoder = fastest(self._plain)
        self._output: CrossKVProjection | Unprojected = Unprojected()
        if payload == "cross_kv":
            scales = None if kv_dtype is None else kv_scales(checkpoint, kv_dtype)
            self._output = CrossKVProjection(checkpoint, torch_dtype, device, scales, int8=int8)
        self._stream = new_stream(device, ENCODE_PRIORITY)
        self._static: StaticEncoder | None = None  # made by `prepare`
        self._kernels: TeamKernels | None = None
        self._shared = _Shared()
        self._is_urgent = False
        if device == "cpu" and torch_dtype in DTYPES:
            self._kernels = team_kernels(torch_dtype, int8=int8)

    def beside(self, *, is_urgent: bool = False, own_threads: bool = False) -> WindowEncoder:
        """A further encoder on the same weights, for another thread (CPU only)."""
        other = copy.copy(self)
        other._is_urgent = is_urgent  # goes before others on the same threads
        if own_threads:
            other._shared = _Shared()
        return other

    @property
    def is_async(self) -> bool:
        return self._stream is not None or self._kernels is not None

    @property
    def contexts_to_warm(self) -> Sequence[int]:
        """Contexts below the full one whose first window is slower than later ones."""
        return self._contexts if self._kernels is not None else ()

    def prepare(self, pool: Tensor, max_batch: int) -> None:
        """On a GPU: capture the graphs that write to `pool`, on the thread that will call."""
        if self._stream is None:
            return
        paged, stream, contexts = _as_paged(pool), self._stream, self._contexts
        if not (has_triton() and scatters(paged)):
            logger.warning("our kernels are not used: the encoder runs without CUDA graphs")
            return
        self._static = StaticEncoder(
            self._mel, self._encoder, self._output, paged, max_batch, stream, contexts
        )
        logger.info("%d CUDA graphs of the encoder", len(self._static.graphs))

    @torch.inference_mode()
    def __call__(
        self,
        windows: Sequence[NDArray[Any]],
        pool: Tensor,
        pages: Sequence[Sequence[int]],
        file_mels: Sequence[FileMel | None] | None = None,
        context: int = FULL,
    ) -> Wait:
        """Encode `windows` into their pages.

        Args:
            windows: each int16 [n], n <= 480000, and its context where it has a `FileMel`.
            pool: mutated; [n_pages, L, 2, page_frames, H, Dh] takes K/V, [n_pages, T,
                n_audio_state] states.
            pages: per window its pages in frame order, as many as its positions take.
            file_mels: None for a window that is no slice of its file.
            context: positions to compute of each window, from its start; FULL (0): all.

        Returns:
            What to wait for before the pages are published: their readers follow no stream's order.
        """
        if self._static is not None:
            return self._static(windows, pages, file_mels, context)
        projection, paged = self._output, _as_paged(pool)
        n_frames = MEL_PER_POSITION * (context or self._dims.n_audio_ctx)
        if self._stream is None:
            mel = self._mel(windows, file_mels)[:, :, :n_frames]
            if self._kernels is not None:
                team = self._team(self._kernels)
                return self._launch_on_team(team, mel, projection, paged, pages)
            projection.write(self._encoder(mel), paged, pages)
            return already_done
        self._stream.wait_stream(default_stream())  # which loaded the weights
        with on_stream(self._stream):
            mel = self._mel(windows, file_mels)[:, :, :n_frames]
            projection.write(self._encoder(mel), paged, pages)
        return waiter_for(self._stream)

    def close(self) -> None:
        """End the threads; no call may follow. Idempotent."""
        if self._shared.team is not None:
            self._shared.team.close()

    def _team(self, kernels: TeamKernels) -> TeamEncoder:
        """Make the threads on the first call, with torch's number and the caller's priority."""
        if self._shared.team is None:
            self._shared.team = TeamEncoder(self._plain, kernels, torch.get_num_threads())
        return self._shared.team

    def _launch_on_team(
        self,
        team: TeamEncoder,
        mel: Tensor,
        projection: CrossKVProjection | Unprojected,
        pool: Tensor,
        pages: Sequence[Sequence[int]],
    ) -> Wait:
        n_positions = mel.shape[2] // MEL_PER_POSITION
        then = already_done
        if isinstance(projection, CrossKVProjection) and is_packed(pool, self._dims.n_audio_ctx):
            packed = [packed_page(pool[own[0]], n_positions) for own in pages]
            sinks = [partial(projection.write_rows, page) for page in packed]
        else:
            shape = (len(mel), n_positions, self._dims.n_audio_state)
            states = torch.empty(shape, dtype=TORCH_DTYPES[self.dtype])
            sinks = [partial(_put_rows, row) for row in states]
            then = partial(projection.write, states, pool, pages)
        futures = [
            team.submit(mel[i : i + 1], sink, is_urgent=self._is_urgent)
            for i, sink in enumerate(sinks)
        ]
        return partial(_finish, futures, then)


@dataclass(slots=True)
class _Shared:
    """State of encoders made with `beside`; the first call must end before others begin."""

    team: TeamEncoder | None = None


def _as_paged(pool: Tensor) -> Tensor:
    """View a pool of states as [n_pages, 1, 1, T, 1, n]; a pool of KV is returned as it is."""
    return as_kv_pool(pool) if pool.dim() == 3 else pool


@torch.inference_mode()
def _finish(futures: list[Future[None]], then: Callable[[], None]) -> None:
    wait(futures)  # for all, so that nothing writes to pages after an error
    for future in futures:
        future.result()
    then()


def _put_rows(states: Tensor, rows: Tensor, begin: int) -> None:
    states[begin : begin + len(rows)] = rows
