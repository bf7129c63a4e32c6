"""A live engine over played speech, on virtual time, and what its sessions told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.common.clock import Clock
from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.common.metrics import ROUTER_METRICS
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import LiveSettings, RouterSettings
from cluster.common.tracing import NO_TRACER, Tracer
from cluster.planning.virtual_time import run_virtually, virtual_clock
from router.live.activity import VoiceActivity
from router.live.interface import (
    LiveConfig,
    LiveEvent,
    ServerVad,
    TextDelta,
    TurnCompleted,
    TurnFailed,
)
from router.live.partial_transcript import AttentionPeak, LocalAgreement, Policy
from router.live.session import LiveEngine, LiveSession
from router.pipeline import Pipeline
from tests.support.checkpoints import cached_checkpoint
from tests.support.live.played_speech import (
    LoudIsSpeech,
    PlayedListeners,
    SpokenWord,
    pcm_of_words,
    spoken,
)
from tests.support.workers.counted import Counted

E = TypeVar("E", bound=LiveEvent)

PIECE_S = 0.05  # of audio, as clients send it
TALK = (
    "the first words come (0.2) and more of them. then another sentence follows here (0.9) "
    "after a long pause. it goes on and on (0.3) until it ends."
)
POLICIES: list[Policy] = [AttentionPeak(), LocalAgreement()]
GAP_S = 0.08  # between words that are cut apart: less than any pause
MANUAL = LiveConfig(language="en", turn_detection=None)
VAD = LiveConfig(language="en", turn_detection=ServerVad())


def plain(text: str) -> list[str]:
    return [word for word in text.replace(".", "").split() if not word.startswith("(")]


def numbered(n: int, gap_s: float = 0.0) -> list[SpokenWord]:
    return spoken(" ".join(f"w{index}" for index in range(n)), gap_s=gap_s)


def micro_tokenizer() -> WhisperTokenizer:
    return WhisperTokenizer.from_checkpoint(open_checkpoint(str(cached_checkpoint("micro"))))


async def at_once(work: Callable[[], None]) -> None:
    """Run a detector's work without a thread, which a virtual clock could not wait for."""
    work()


@dataclass
class PlayedEngine:
    words: list[SpokenWord]
    policy: Policy = field(default_factory=AttentionPeak)
    settings: LiveSettings = field(default_factory=LiveSettings)
    tracer: Tracer = NO_TRACER
    detector: LoudIsSpeech = field(default_factory=LoudIsSpeech)

    def __post_init__(self) -> None:
        self.clock: Clock = virtual_clock()
        self.counted = Counted(ROUTER_METRICS)
        tokenizer = micro_tokenizer()
        self.pools = PlayedListeners(tokenizer, self.words)
        pipeline = Pipeline(
            self.pools,
            self.pools,
            RouterSettings(),
            self.counted.recorder,
            self.tracer,
            self.clock,
            reuses_kv=False,
        )
        self.activity = VoiceActivity(lambda: self.detector, self.clock.sleep, at_once)
        self.engine = LiveEngine(
            pipeline,
            tokenizer,
            self.settings,
            policy=self.policy,
            n_text_ctx=448,
            activity=self.activity,
            recorder=self.counted.recorder,
            tracer=self.tracer,
            clock=self.clock,
        )

    def n_updates(self, outcome: str) -> int:
        return len(self.counted.of("splitscribe_live_updates_total", outcome=outcome))

    async def close(self) -> None:
        await self.engine.close()
        await self.activity.close()


@dataclass
class Told:
    events: list[tuple[float, LiveEvent]] = field(default_factory=list)

    def of(self, kind: type[E]) -> list[E]:
        return [event for _, event in self.events if isinstance(event, kind)]

    @property
    def texts(self) -> dict[int, str]:
        texts: dict[int, str] = {}
        for delta in self.of(TextDelta):
            texts[delta.turn] = texts.get(delta.turn, "") + delta.text
        return texts

    @property
    def words(self) -> list[str]:
        return plain(" ".join(self.texts[turn] for turn in sorted(self.texts)))

    def when(self, kind: type, turn: int) -> float:
        return next(at for at, e in self.events if isinstance(e, kind) and e.turn == turn)  # type: ignore[attr-defined]

    def check_ends(self) -> None:
        ends = [event for _, event in self.events if isinstance(event, TurnCompleted | TurnFailed)]
        numbers = [event.turn for event in ends]
        assert len(set(numbers)) == len(numbers), f"a turn ended twice: {numbers}"
        assert set(numbers) == {event.turn for _, event in self.events}
        for number in numbers:
            last = [event for _, event in self.events if event.turn == number][-1]
            assert isinstance(last, TurnCompleted | TurnFailed)
            if isinstance(last, TurnCompleted):
                assert last.text == self.texts.get(number, "")


async def listen(session: LiveSession, clock: Clock) -> Told:
    told = Told()
    async for event in session.events():
        told.events.append((clock.monotonic(), event))
    return told


async def speak(session: LiveSession, pcm: Pcm, clock: Clock) -> None:
    step = round(PIECE_S * SAMPLE_RATE)
    began_s = clock.monotonic()
    for first in range(0, pcm.shape[0], step):
        due_s = began_s + min(first + step, pcm.shape[0]) / SAMPLE_RATE
        await clock.sleep(max(0.0, due_s - clock.monotonic()))
        session.append(pcm[first : first + step])


Client = Callable[[LiveSession, Pcm, PlayedEngine], Awaitable[Any]]


async def speak_all(session: LiveSession, pcm: Pcm, played: PlayedEngine) -> None:
    await speak(session, pcm, played.clock)
    session.commit()  # which finds nothing where silence has ended the turn


async def converse(
    played: PlayedEngine, pcm: Pcm, config: LiveConfig = MANUAL, client: Client = speak_all
) -> Told:
    session = played.engine.open(config, session_id="live")
    listening = asyncio.ensure_future(listen(session, played.clock))
    await client(session, pcm, played)
    await session.drain()
    told = await listening
    told.check_ends()
    return told


def play(
    talk: str | list[SpokenWord],
    config: LiveConfig = MANUAL,
    client: Client = speak_all,
    *,
    prepare: Callable[[PlayedEngine], Any] = lambda played: None,
    pcm: Pcm | None = None,
    tail_s: float = 1.5,
    **engine: Any,
) -> tuple[Told, PlayedEngine]:
    """engine: fields of `PlayedEngine`. prepare: changes it first. pcm: not the talk's."""

    async def run() -> tuple[Told, PlayedEngine]:
        words = spoken(talk) if isinstance(talk, str) else talk
        played = PlayedEngine(words, **engine)
        prepare(played)
        audio = pcm_of_words(words, tail_s) if pcm is None else pcm
        told = await converse(played, audio, config, client)
        await played.close()
        return told, played

    return run_virtually(run())
