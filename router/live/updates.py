"""One update: a stretch's audio through both pools, as one window like any other.

Makes the window and its decode options of what the session knows, and a `Hypothesis` of the answer.
Knows nothing of policies, turns' texts or when updates are due.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.clock import SYSTEM_CLOCK, Clock
from cluster.messages import DecodeOptions, DecodeResult, Pcm, QualityGates
from cluster.model.encoder_context import SAMPLES_PER_POSITION
from cluster.model.text.quality import is_silence, repeats_itself
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.tracing import NO_TRACER, Tracer
from router.api.params import LADDER, PARALLEL_GATES
from router.interface import RequestContext
from router.live.interface import LiveConfig
from router.live.policies import Hypothesis
from router.pipeline import Pipeline, RequestRun, WindowAudio
from router.text_context import TextContext

UPDATE_TIME_S = 30.0  # an update that takes longer has failed
FINAL_TIME_S = 60.0  # the same for the last decode of a stretch, which has no successor
LEAST_TOKENS = 24  # that an update may sample, and as many more for each second that is new
TOKENS_PER_S = 16
START_TOKENS = 5  # what stands before the forced ones: the prompt's mark, and the start sequence
LEAST_ROOM = 64  # tokens for new text, for which a long prompt gives way
# Of an update only repetition is held against it: audio that ends within a word is always unsure.
UPDATE_GATES = QualityGates(avg_logprob=None, no_speech_prob=None)


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be decoded.

    pcm: the stretch's audio so far, int16 [n].
    forced: tokens that the text begins with. fresh_s: seconds of audio behind those.
    is_final: no more audio follows, so its words have to be right now.
    """

    config: LiveConfig
    pcm: Pcm
    forced: tuple[int, ...]
    fresh_s: float
    language: str | None
    is_final: bool


@dataclass(frozen=True, slots=True)
class Decoded:
    """What came of it. is_trusted: it holds speech, and does not repeat itself."""

    hypothesis: Hypothesis
    language: str
    is_trusted: bool
    encode_s: float


class Updates:
    """Decodes the updates of all sessions with one model."""

    def __init__(
        self,
        pipeline: Pipeline,
        tokenizer: WhisperTokenizer,
        n_text_ctx: int,
        context_for: Callable[[int], int] | None,
        clock: Clock = SYSTEM_CLOCK,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """context_for: as in `WindowAudio.of_samples`. tracer: makes a span for each update."""
        self._tracer = tracer
        self._pipeline = pipeline
        self._tokenizer = tokenizer
        self._n_text_ctx = n_text_ctx
        self._context_for = context_for
        self._clock = clock

    async def decode(
        self,
        work: Work,
        *,
        request_id: str,
        turn: int,
        number: int,
        owner: bytes,
        peaks: bool,
        parent: str = "",
    ) -> Decoded:
        """Take one update through both pools. Cancelling it ends it everywhere.

        Its span has the session's id, and the numbers of its turn and its own.

        Args:
            request_id: the session's, for logs and traces; `number` tells its updates apart.
            peaks: ask for the peaks of attention.
            parent: traceparent of the turn's span.

        Raises:
            SplitscribeError: as `Pipeline.decode`.
        """
        time_s = FINAL_TIME_S if work.is_final else UPDATE_TIME_S
        context = RequestContext.unlimited(request_id, time_s, self._clock)
        context.owner, context.priority = owner, "live"
        with self._tracer.span(
            "live update",
            parent,
            request_id=request_id,
            turn=turn,
            update=number,
            is_final=work.is_final,
        ) as span:
            context.span = span
            return await self._decode(RequestRun(context), work, number, peaks)

    async def _decode(self, run: RequestRun, work: Work, number: int, peaks: bool) -> Decoded:
        audio = WindowAudio.of_samples(number, work.pcm, self._context_for)
        options = self._options(work, peaks)
        result = await self._pipeline.decode(run, audio, options)
        allowed = work.config.languages
        if options.language is None and allowed and result.language not in allowed:
            options = replace(options, language=allowed[0])
            result = await self._pipeline.decode(run, audio, options)
        return Decoded(
            Hypothesis(
                result.tokens,
                result.token_logprobs,
                result.peak_positions or (),
                work.pcm.shape[0] // SAMPLES_PER_POSITION,
            ),
            result.language,
            self._is_trusted(result, work.forced),
            run.encode_s,
        )

    def _options(self, work: Work, peaks: bool) -> DecodeOptions:
        config = work.config
        context = TextContext(
            self._tokenizer,
            self._n_text_ctx,
            prompt=config.prompt,
            hotwords=", ".join(config.keywords),
        )
        prompt = context.prompt_tokens()
        room = self._n_text_ctx - START_TOKENS - len(work.forced)
        prompt = prompt[len(prompt) - max(0, min(len(prompt), room - LEAST_ROOM)) :]
        room = min(room - len(prompt), self._n_text_ctx // 2)
        wanted = room if work.is_final else LEAST_TOKENS + round(TOKENS_PER_S * work.fresh_s)
        return DecodeOptions(
            language=self._language(work),
            timestamps=True,
            prompt_tokens=prompt,
            temperatures=LADDER if work.is_final else (0.0,),
            max_new_tokens=max(1, min(room, wanted)),
            gates=PARALLEL_GATES if work.is_final else UPDATE_GATES,
            prefix_tokens=work.forced,
            peaks=peaks,
        )

    def _language(self, work: Work) -> str | None:
        if not self._tokenizer.is_multilingual:
            return "en"
        if work.config.language is None and len(work.config.languages) == 1:
            return work.config.languages[0]
        return work.language or work.config.language

    def _is_trusted(self, result: DecodeResult, forced: Sequence[int]) -> bool:
        gates = PARALLEL_GATES
        if repeats_itself(gates, result.compression_ratio):
            return False
        return bool(forced) or not is_silence(gates, result.avg_logprob, result.no_speech_prob)
