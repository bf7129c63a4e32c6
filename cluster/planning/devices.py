"""Simulated devices and links, and replacements of the models that only take time.

An engine's step returns at once and moves its worker's clock ahead of the event loop's by the
step's duration. Its results are delivered when the loop's clock has reached the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapreplace
from typing import Any

from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.planning.profile import LinkProfile, Profile, Surface
from cluster.planning.scenario import n_tokens
from decoder_worker.sampling.search import Row, StepOutput
from decoder_worker.scheduling.sequence import DecodeSequence

POSITIONS_STEP = 50  # a batch's mean context is rounded to a multiple of it
LOGPROB = -0.1
TEXT = (1000, 1448)  # range of token ids, one for each token that a window may have
MEL_PER_STEP = 2  # mel frames in a timestamp's step of 20 ms


class WorkerClock:
    """The monotonic clock of one worker thread, in seconds; never behind the event loop's."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._loop_now = now
        self._ahead_to_s = 0.0

    def now(self) -> float:
        now_s, ahead_to_s = self._loop_now(), self._ahead_to_s
        return now_s if now_s > ahead_to_s else ahead_to_s  # quicker than max()

    def wait_until(self, at_s: float) -> None:
        self._ahead_to_s = max(self._ahead_to_s, at_s)


class Device:
    """A device, or a group of `n_lanes` processes. Launches start in the order they come."""

    def __init__(self, n_lanes: int = 1) -> None:
        self.busy_s = 0.0
        self._free_at_s = [0.0] * n_lanes  # a heap

    def launch(self, now_s: float, seconds: float) -> float:
        """Queue a launch that takes `seconds`, and return the time at which it is done."""
        done_s = max(now_s, self._free_at_s[0]) + seconds
        heapreplace(self._free_at_s, done_s)
        self.busy_s += seconds
        return done_s


class Links:
    """The links of a cell. Between nodes each node has one port for each direction."""

    def __init__(self, within: LinkProfile, between: LinkProfile) -> None:
        self._within, self._between = within, between
        self._free_at_s: dict[str, float] = {}

    def read_s(self, n_bytes: int, source: str, target: str, now_s: float) -> float:
        """Post a READ now, and return the seconds until it is done; its ports are busy so long."""
        link = self._within if source == target else self._between
        ports = () if source == target else (f"out {source}", f"in {target}")
        begin_s = max([now_s, *(self._free_at_s.get(port, 0.0) for port in ports)])
        moved_s = begin_s + n_bytes / link.bytes_per_s
        self._free_at_s.update(dict.fromkeys(ports, moved_s))
        return moved_s + link.latency_s - now_s


class WaitingForward:
    """Replaces `WindowEncoder`: a batch only takes the profile's time."""

    is_async = True

    def __init__(self, profile: Profile, device: Device, clock: WorkerClock) -> None:
        self._surface = Surface(profile.encoder.points)
        self._n_audio_ctx = profile.shape.n_audio_ctx
        self._device = device
        self._clock = clock

    def __call__(
        self, windows: Sequence[Any], _pool: Any, _pages: Any, _mels: Any, context: int
    ) -> Callable[[], None]:
        seconds = self._surface.at(len(windows), context or self._n_audio_ctx)
        done_s = self._device.launch(self._clock.now(), seconds)
        return partial(self._clock.wait_until, done_s)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class WaitingLaunch:
    sequences: tuple[DecodeSequence, ...]
    done_s: float


class WaitingRunner:
    """Replaces `ModelRunner`: steps take the profile's time, tokens follow the window's length.

    The text has no repetitions, which would make the decoder fall back to a higher temperature.
    """

    def __init__(
        self, profile: Profile, tokenizer: WhisperTokenizer, device: Device, clock: WorkerClock
    ) -> None:
        self._steps = Surface(profile.decoder.steps)
        self._prefills = Surface(profile.decoder.prefills)
        self._device, self._clock = device, clock
        special = tokenizer.special
        self._end = StepOutput(special.eot, LOGPROB)
        self._text = [StepOutput(token, LOGPROB) for token in range(*TEXT)]
        self._stamps = [StepOutput(special.timestamp_begin + n, LOGPROB) for n in range(1501)]

    def prefill(self, sequences: Sequence[DecodeSequence]) -> WaitingLaunch:
        return self._launch(sequences, self._prefills)

    def decode(self, sequences: Sequence[DecodeSequence]) -> WaitingLaunch:
        return self._launch(sequences, self._steps)

    def collect(self, launch: WaitingLaunch) -> list[list[StepOutput]]:
        self._clock.wait_until(launch.done_s)
        return [
            [self._next(s, row) for row in s.live] if s.search is not None else []
            for s in launch.sequences
        ]

    def most_steps(self, sequences: Sequence[DecodeSequence]) -> int:
        return 1

    def nothing(self, *_: Any) -> None:
        pass  # a copy's time is a part of the step's

    listen = interrupt = restore = copy_kv = nothing

    def _launch(self, sequences: Sequence[DecodeSequence], surface: Surface) -> WaitingLaunch:
        n_rows = sum([len(s.live) for s in sequences])
        mean = sum([s.request.handle.frames for s in sequences]) / len(sequences)
        positions = round(mean / POSITIONS_STEP) * POSITIONS_STEP
        done_s = self._device.launch(self._clock.now(), surface.at(n_rows, positions))
        return WaitingLaunch(tuple(sequences), done_s)

    def _next(self, sequence: DecodeSequence, row: Row) -> StepOutput:
        n_given, n_frames = len(row.tokens), sequence.request.content_frames
        n_wanted = min(n_tokens(n_frames), sequence.n_new_max)
        if n_given >= n_wanted:
            return self._end
        if n_given in (0, n_wanted - 1):
            return self._stamps[n_frames // MEL_PER_STEP if n_given else 0]
        return self._text[n_given]
