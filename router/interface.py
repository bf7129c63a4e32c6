"""What `router.http` and the command line ask of a request, and what they are told of it.

They call a `Transcriber`, one for each model: that of `router.transcriber`, or a test's. Through
its `RequestContext` a running request learns how long it may take and says what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from cluster.common.clock import SYSTEM_CLOCK, Clock
from cluster.common.messages import Priority, Role, WorkerStatus
from cluster.common.tracing import NO_SPAN, Span
from router.api.params import TranscriptionParams
from router.transcript import Segment, TokenLogprob, Transcript


@dataclass(slots=True)
class StageTimings:
    """Where a request's time went, so far. Seconds are summed over its windows, which overlap.

    audio_s: the upload's decoding and cutting; queue_s: waiting in both pools' workers;
    encode_s: encoder batches; transfer_s and transfer_bytes: reading the KV; decode_s: prefill
    and decode steps; steps: decode steps; windows: windows decoded; attempts: encodes sent,
    more than `windows` where a worker failed, or where a trimmed context did not suffice;
    cache_hits, cache_misses: of them those that were answered with KV that was there, and those
    that were not; both 0 where nothing is kept.
    """

    audio_s: float = 0.0
    queue_s: float = 0.0
    encode_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    transfer_bytes: int = 0
    steps: int = 0
    windows: int = 0
    attempts: int = 0
    cache_hits: int = 0
    cache_misses: int = 0


@dataclass(frozen=True, slots=True)
class TranscriptionResult:
    """A finished request."""

    transcript: Transcript
    timings: StageTimings


@dataclass(frozen=True, slots=True)
class PoolHealth:
    """One role's replicas. `ready`: one of them is healthy, or the pool may sleep.

    workers: of a large pool some, chosen anew each time.
    """

    ready: bool
    replicas: int
    workers: Sequence[WorkerStatus] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """What a running request is now certain of, in time order; nothing of it changes later.

    text: what follows the text of all updates before; joined, they are the transcript's text.
    segments: closed since, with their final ids; a text may come before its segment is closed.
    logprobs: of the tokens behind `text`, empty unless they were asked for.
    """

    text: str = ""
    segments: tuple[Segment, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class AudioShare(Protocol):
    """A request's share of the audio-seconds that the router may hold at once."""

    def expect(self, audio_s: float) -> None:
        """Correct the estimate before work began. Raises CrowdedError if it cannot stay."""

    def found(self, audio_s: float) -> None:
        """Count at least so much audio, found by now; never refuses."""


@dataclass(frozen=True, slots=True)
class DeadlineRule:
    """How long a request may take: `factor` times its audio, and within the two bounds."""

    min_s: float
    factor: float
    max_s: float

    def seconds(self, audio_s: float) -> float:
        return min(max(self.min_s, self.factor * audio_s), self.max_s)


@dataclass(slots=True)
class RequestContext:
    """One request's identity and time.

    The deadline counts from `started_s` (the clock's, when the upload was complete). It grows as
    audio is found.

    share: None where nobody admits it.
    owner: whose audio it is, for those who keep its KV: opaque, and never an API key; empty where
        the API needs none.
    priority: the class of all its windows.
    """

    request_id: str
    share: AudioShare | None
    deadline: DeadlineRule
    clock: Clock = SYSTEM_CLOCK
    audio_s: float = 0.0
    started_s: float = field(init=False)
    finished_s: float = 0.0
    span: Span = NO_SPAN  # of the whole request
    owner: bytes = field(default=b"", repr=False)
    priority: Priority = "interactive"
    on_progress: Callable[[float, float], None] | None = None  # gets (finished_s, audio_s)
    on_update: Callable[[Update], None] | None = None  # gets, in order, what is certain

    @classmethod
    def unlimited(cls, request_id: str, time_s: float, clock: Clock = SYSTEM_CLOCK) -> Self:
        """A request without a client: `time_s` from now, however much audio it holds."""
        return cls(request_id, None, DeadlineRule(time_s, 0.0, time_s), clock)

    def __post_init__(self) -> None:
        self.started_s = self.clock.monotonic()

    def update(self, update: Update) -> None:
        """Call, in time order, with what can no longer change."""
        if self.on_update is not None:
            self.on_update(update)

    def finished_audio(self, audio_s: float) -> None:
        """Call as windows are done, with the seconds of audio in each."""
        self.finished_s += audio_s
        if self.on_progress is not None:
            self.on_progress(self.finished_s, self.audio_s)

    def expect_audio(self, audio_s: float) -> None:
        """Call once when the container tells its length, before the first window is sent.

        Raises:
            CrowdedError: so much audio does not fit beside what is pending.
        """
        if self.share is not None:
            self.share.expect(audio_s)
        self.audio_s = audio_s

    def found_audio(self, audio_s: float) -> None:
        """Call as windows are found, with the seconds of audio seen so far (a total)."""
        if self.share is not None:
            self.share.found(audio_s)
        self.audio_s = max(self.audio_s, audio_s)

    @property
    def deadline_s(self) -> float:
        """The whole time that the request gets, in seconds from `started_s`."""
        return self.deadline.seconds(self.audio_s)

    def remaining_s(self) -> float:
        """Seconds left; negative when over. Ask anew before each use: it can grow."""
        return self.started_s + self.deadline_s - self.clock.monotonic()


class Transcriber(Protocol):
    """Turns the upload of a request into a transcript, with one model."""

    async def transcribe(
        self, upload: Path, params: TranscriptionParams, context: RequestContext
    ) -> TranscriptionResult:
        """Transcribe the file at `upload`, which lives until this returns.

        Cancelling the call cancels every window of the request everywhere. The call raises
        DeadlineExceededError when `context.remaining_s()` has run out; its caller cancels it a
        moment later if it does not.

        Raises:
            SplitscribeError: any class; its status becomes the answer's.
        """

    async def detect_language(self, upload: Path, context: RequestContext) -> tuple[str, float]:
        """Return the code and the probability of the language of 30 s of the file at `upload`.

        They begin where the speech does. All else is as with `transcribe`.
        """

    async def health(self) -> dict[Role, PoolHealth]:
        """Return the state of both pools, within a second or two.

        A request can go all the way through when both are ready.
        """
