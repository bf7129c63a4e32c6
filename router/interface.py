"""The interface through which `router.http` and the command line run requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol, Self

from cluster.common.clock import SYSTEM_CLOCK, Clock
from cluster.common.errors import DeadlineExceededError, InvalidRequestError
from cluster.common.messages import WINDOW_S, Priority, Role, WorkerStatus
from cluster.common.tracing import NO_SPAN, Span
from router.api.params import TranscriptionParams
from router.transcript import Segment, TokenLogprob, Transcript

TIMEOUT_HEADER = "x-splitscribe-timeout"  # with the seconds that a client gives a request
RECENT = 0.1  # weight of the newest window in `Progress.pace_s`


@dataclass(slots=True)
class StageTimings:
    """Seconds that a request spent in each stage, summed over its windows, which overlap."""

    audio_s: float = 0.0  # the upload's decoding and cutting
    queue_s: float = 0.0  # waiting in queues
    first_queue_s: float = 0.0  # the first window's part, which waits for no other
    encode_s: float = 0.0  # encoder batches
    transfer_s: float = 0.0  # reading the KV
    decode_s: float = 0.0  # prefill and decode steps
    transfer_bytes: int = 0
    steps: int = 0
    windows: int = 0  # decoded
    attempts: int = 0  # encodes sent: more than `windows` after failures and trimmed contexts
    failures: int = 0  # tries of a window that a worker failed
    cache_hits: int = 0  # windows whose KV was there already
    cache_misses: int = 0  # the others; both 0 where nothing is kept

    def waited(self, window: int, seconds: float) -> None:
        self.queue_s += seconds
        if window == 0 and not self.windows:  # the rest of window 0 may wait behind others
            self.first_queue_s += seconds

    def add(self, part: StageTimings) -> None:
        """Add the timings of a part of the request that ran in parallel with others."""
        first_queue_s = max(self.first_queue_s, part.first_queue_s)
        for name, value in asdict(part).items():
            setattr(self, name, getattr(self, name) + value)
        self.first_queue_s = first_queue_s


@dataclass(frozen=True, slots=True)
class TranscriptionResult:
    transcript: Transcript
    timings: StageTimings


@dataclass(frozen=True, slots=True)
class PoolHealth:
    ready: bool  # a replica is healthy, or the pool may sleep
    replicas: int
    workers: Sequence[WorkerStatus] = ()  # a random sample of a large pool


@dataclass(frozen=True, slots=True)
class Update:
    """New results of a running request, in time order. They never change later."""

    text: str = ""  # follows the text of earlier updates; together they are the transcript
    segments: tuple[Segment, ...] = ()  # closed since the last update, with final ids
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens of `text`, if requested


class AudioShare(Protocol):
    """A request's share of the audio-seconds that the router may hold at once."""

    def expect(self, audio_s: float) -> None:
        """Correct the estimate before work begins. Raises CrowdedError if it does not fit."""

    def found(self, audio_s: float) -> None:
        """Count at least this much audio. Never refuses."""


@dataclass(slots=True)
class Progress:
    """Progress of one model's pools as seen by this router, in the clock's time."""

    ended_s: float = -math.inf  # when the last window of any request ended
    asleep_s: float = -math.inf  # when a pool last had no worker
    pace_s: float = 0.0  # recent working time of a long file's window, without waiting


@dataclass(slots=True)
class RequestContext:
    """One request's identity, deadlines and callbacks.

    It is over when no window of any request has ended for `stall_s`, or `timeout_s` after
    `started_s` (the clock's, when the upload was complete), whichever comes first.
    """

    request_id: str
    share: AudioShare | None  # None: not subject to admission
    stall_s: float = math.inf
    timeout_s: float = math.inf
    clock: Clock = SYSTEM_CLOCK
    progress: Progress = field(default_factory=Progress)  # shared with other requests
    audio_s: float = 0.0
    started_s: float = field(init=False)
    moved_s: float = field(init=False)  # when work beside its windows last ended
    finished_s: float = 0.0
    span: Span = NO_SPAN  # of the whole request
    owner: bytes = field(default=b"", repr=False)  # who may reuse its KV: opaque, never an API key
    client: bytes = field(default=b"", repr=False)  # the unit of fair sharing
    priority: Priority = "interactive"  # of all its windows
    on_progress: Callable[[float, float], None] | None = None  # gets (finished_s, audio_s)
    on_update: Callable[[Update], None] | None = None  # gets new results in order

    @classmethod
    def unlimited(cls, request_id: str, time_s: float, clock: Clock = SYSTEM_CLOCK) -> Self:
        """A request without a client, which ends `time_s` from now."""
        return cls(request_id, None, timeout_s=time_s, clock=clock)

    def __post_init__(self) -> None:
        self.started_s = self.moved_s = self.clock.monotonic()

    @contextmanager
    def beside_windows(self) -> Iterator[None]:
        """Suspend `stall_s` during work that may outlast all windows and is sure to end."""
        self.moved_s = math.inf
        try:
            yield
        finally:
            self.moved_s = self.clock.monotonic()

    def window_ended(self, pace_s: float) -> None:
        progress = self.progress
        progress.ended_s = self.clock.monotonic()
        progress.pace_s += (pace_s - progress.pace_s) * (RECENT if progress.pace_s else 1.0)

    def update(self, update: Update) -> None:
        if self.on_update is not None:
            self.on_update(update)

    def finished_audio(self, audio_s: float) -> None:
        self.finished_s += audio_s
        if self.on_progress is not None:
            self.on_progress(self.finished_s, self.audio_s)

    def expect_audio(self, audio_s: float) -> None:
        """Call once with the container's length. Raises CrowdedError if it does not fit, and
        InvalidRequestError if it takes longer than `timeout_s` at the workers' pace.
        """
        needed_s = self.progress.pace_s * audio_s / WINDOW_S
        if needed_s > self.timeout_s:
            raise InvalidRequestError(
                f"{audio_s:.0f} s of audio take {needed_s:.0f} s or more at the speed of the last "
                f"windows, and '{TIMEOUT_HEADER}' gives {self.timeout_s:g} s. Give them more, or "
                "send what may take its time to /v1/batches.",
                param=TIMEOUT_HEADER,
                code="timeout_too_short",
            )
        if self.share is not None:
            self.share.expect(audio_s)
        self.audio_s = audio_s

    def found_audio(self, audio_s: float) -> None:
        """Call as windows are found, with the total seconds of audio seen so far."""
        if self.share is not None:
            self.share.found(audio_s)
        self.audio_s = max(self.audio_s, audio_s)

    def remaining_s(self) -> float:
        """Seconds left, negative when over. Ask before each use: it grows as windows end."""
        now_s = self.clock.monotonic()
        moved_s = min(now_s, max(self.moved_s, self.progress.ended_s))
        return min(self.started_s + self.timeout_s, moved_s + self.stall_s) - now_s

    def too_late(self) -> DeadlineExceededError:
        if self.clock.monotonic() - self.started_s < self.timeout_s:
            return DeadlineExceededError(f"no window was finished for {self.stall_s:.0f} s")
        return DeadlineExceededError(
            f"the request did not finish within its {self.timeout_s:g} s", code="timeout_exceeded"
        )


class Transcriber(Protocol):
    def check(self, params: TranscriptionParams) -> None:
        """Raises UnsupportedValueError if the server lacks the network that `params` need."""

    async def transcribe(
        self, upload: Path, params: TranscriptionParams, context: RequestContext
    ) -> TranscriptionResult:
        """Transcribe the file at `upload`, which must exist until this returns. Cancelling the call
        cancels all windows of the request. Raises DeadlineExceededError when
        `context.remaining_s()` runs out; if it does not, the caller cancels it soon after.
        """

    async def detect_language(self, upload: Path, context: RequestContext) -> tuple[str, float]:
        """Code and probability of the language of the first 30 s of speech."""

    async def health(self) -> dict[Role, PoolHealth]:
        """The state of both pools, within a second or two."""
