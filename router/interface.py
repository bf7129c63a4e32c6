"""How `router.http` and the command line run a request: the protocol, its options, its events."""

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
RECENT = 0.1  # what the newest window counts for in `Progress.pace_s`


@dataclass(slots=True)
class StageTimings:
    """Where a request's time went, so far. Seconds are summed over its windows, which overlap."""

    audio_s: float = 0.0  # the upload's decoding and cutting
    queue_s: float = 0.0  # waiting in queues
    first_queue_s: float = 0.0  # of it the first window's, which waits for none of its own request
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
        if window == 0 and not self.windows:  # what was left of it may come again, behind others
            self.first_queue_s += seconds

    def add(self, part: StageTimings) -> None:
        """Of a part of the request that ran beside other parts."""
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
    """One role's replicas."""

    ready: bool  # one of them is healthy, or the pool may sleep
    replicas: int
    workers: Sequence[WorkerStatus] = ()  # of a large pool some, chosen anew each time


@dataclass(frozen=True, slots=True)
class Update:
    """What a running request is now certain of, in time order; nothing of it changes later."""

    text: str = ""  # follows the text of all updates before; joined, they are the transcript's
    segments: tuple[Segment, ...] = ()  # closed since, with final ids
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens behind `text`, where asked for


class AudioShare(Protocol):
    """A request's share of the audio-seconds that the router may hold at once."""

    def expect(self, audio_s: float) -> None:
        """Correct the estimate before work began. Raises CrowdedError if it cannot stay."""

    def found(self, audio_s: float) -> None:
        """Count at least so much audio, found by now; never refuses."""


@dataclass(slots=True)
class Progress:
    """What this router has seen of one model's pools; times are the clock's."""

    ended_s: float = -math.inf  # when a window ended last, of any request
    asleep_s: float = -math.inf  # when a pool had no worker last
    pace_s: float = 0.0  # of a long file's window, as workers took of late and without waiting


@dataclass(slots=True)
class RequestContext:
    """One request's identity and time.

    A request lives while windows end, its own or others' before which it waits, and while its
    voices are told apart: it is over when nothing has ended for `stall_s`, or `timeout_s` after
    `started_s` (the clock's, when the upload was complete), whichever comes first.
    """

    request_id: str
    share: AudioShare | None  # None where nobody admits it
    stall_s: float = math.inf
    timeout_s: float = math.inf
    clock: Clock = SYSTEM_CLOCK
    progress: Progress = field(default_factory=Progress)  # of those it may wait for, too
    audio_s: float = 0.0
    started_s: float = field(init=False)
    moved_s: float = field(init=False)  # when work beside its windows ended last
    finished_s: float = 0.0
    span: Span = NO_SPAN  # of the whole request
    owner: bytes = field(default=b"", repr=False)  # of the KV: opaque, never an API key
    client: bytes = field(default=b"", repr=False)  # who shares the workers fairly
    priority: Priority = "interactive"  # of all its windows
    on_progress: Callable[[float, float], None] | None = None  # gets (finished_s, audio_s)
    on_update: Callable[[Update], None] | None = None  # gets, in order, what is certain

    @classmethod
    def unlimited(cls, request_id: str, time_s: float, clock: Clock = SYSTEM_CLOCK) -> Self:
        """A request without a client: `time_s` from now, however much audio it holds."""
        return cls(request_id, None, timeout_s=time_s, clock=clock)

    def __post_init__(self) -> None:
        self.started_s = self.moved_s = self.clock.monotonic()

    @contextmanager
    def beside_windows(self) -> Iterator[None]:
        """Around work that may outlast all windows, and whose end is sure: as if one had ended."""
        self.moved_s = math.inf
        try:
            yield
        finally:
            self.moved_s = self.clock.monotonic()

    def window_ended(self, pace_s: float) -> None:
        """`pace_s`: as in `Progress`."""
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
        """Call once when the container tells its length. Raises InvalidRequestError where
        `timeout_s` does not suffice at the workers' pace, CrowdedError where so much audio does not
        fit.
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
        """Call as windows are found, with the seconds of audio seen so far (a total)."""
        if self.share is not None:
            self.share.found(audio_s)
        self.audio_s = max(self.audio_s, audio_s)

    def remaining_s(self) -> float:
        """Seconds left; negative when over. Ask anew before each use: it grows as windows end."""
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
    """Turns the upload of a request into a transcript, with one model."""

    def check(self, params: TranscriptionParams) -> None:
        """Raises UnsupportedValueError: they ask for what this server was given no network for."""

    async def transcribe(
        self, upload: Path, params: TranscriptionParams, context: RequestContext
    ) -> TranscriptionResult:
        """Transcribe the file at `upload`, which lives until this returns. Cancelling the call
        cancels every window of the request everywhere. It raises DeadlineExceededError when
        `context.remaining_s()` has run out; its caller cancels it a moment later if it does not.
        """

    async def detect_language(self, upload: Path, context: RequestContext) -> tuple[str, float]:
        """Code and probability of the language of 30 s, from the first speech on."""

    async def health(self) -> dict[Role, PoolHealth]:
        """The state of both pools, within a second or two."""
