"""One update: takes the audio of an utterance through both pools, as one window like any other.

It makes the window and its decode options from what the session knows, and a `Hypothesis` from the
result. It knows nothing of policies, of the text of turns, or of when updates are due.
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

UPDATE_TIME_S = 30.0  # deadline of an update
FINAL_TIME_S = 60.0  # deadline of a final update, which no other update follows
# An update may sample so many tokens, and so many more for each second of new audio.
LEAST_TOKENS = 24
TOKENS_PER_S = 16
START_TOKENS = 5  # tokens before the prefix: <|startofprev|> and the start sequence
LEAST_ROOM = 64  # tokens that a long prompt leaves for new text
# An update fails for repetition only: its audio may end within a word, which lowers avg_logprob.
UPDATE_GATES = QualityGates(avg_logprob=None, no_speech_prob=None)


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """What one update decodes.

    pcm: the utterance's audio so far, int16 [n_samples].
    prefix_tokens: the confirmed tokens, with which the text is forced to begin.
    new_audio_s: seconds of audio after the last confirmed token.
    language: of the turn's confirmed text; None if there is none.
    is_final: no more audio follows, so all quality gates and temperatures are used.
    """

    config: LiveConfig
    pcm: Pcm
    prefix_tokens: tuple[int, ...]
    new_audio_s: float
    language: str | None
    is_final: bool


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of one update.

    is_trusted: the audio holds speech, and the text does not repeat itself.
    encode_s: seconds that the encoder took.
    """

    hypothesis: Hypothesis
    language: str
    is_trusted: bool
    encode_s: float


class UpdateDecoder:
    """Decodes the updates of all sessions of one model."""

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
        request: UpdateRequest,
        *,
        request_id: str,
        turn: int,
        number: int,
        owner: bytes,
        with_peaks: bool,
        parent: str = "",
    ) -> UpdateResult:
        """Take one update through both pools. Cancelling the call cancels it in queues and workers.

        Args:
            request_id: the session's id, for logs and traces.
            turn: number of the turn.
            number: number of the update within the session, from 1 on.
            owner: whose audio it is, as in `RequestContext`.
            with_peaks: ask for attention peaks.
            parent: traceparent of the turn's span.

        Raises:
            SplitscribeError: as `Pipeline.decode`.
        """
        time_s = FINAL_TIME_S if request.is_final else UPDATE_TIME_S
        context = RequestContext.unlimited(request_id, time_s, self._clock)
        context.owner, context.priority = owner, "live"
        with self._tracer.span(
            "live update",
            parent,
            request_id=request_id,
            turn=turn,
            update=number,
            is_final=request.is_final,
        ) as span:
            context.span = span
            return await self._decode(RequestRun(context), request, number, with_peaks)

    async def _decode(
        self, run: RequestRun, request: UpdateRequest, number: int, with_peaks: bool
    ) -> UpdateResult:
        audio = WindowAudio.of_samples(number, request.pcm, self._context_for)
        options = self._options(request, with_peaks)
        result = await self._pipeline.decode(run, audio, options)
        allowed = request.config.languages
        if options.language is None and allowed and result.language not in allowed:
            options = replace(options, language=allowed[0])
            result = await self._pipeline.decode(run, audio, options)
        return UpdateResult(
            Hypothesis(
                result.tokens,
                result.token_logprobs,
                result.peak_positions or (),
                request.pcm.shape[0] // SAMPLES_PER_POSITION,
            ),
            result.language,
            self._is_trusted(result, request.prefix_tokens),
            run.encode_s,
        )

    def _options(self, request: UpdateRequest, with_peaks: bool) -> DecodeOptions:
        config = request.config
        context = TextContext(
            self._tokenizer,
            self._n_text_ctx,
            prompt=config.prompt,
            hotwords=", ".join(config.keywords),
        )
        prompt = context.prompt_tokens()
        room = self._n_text_ctx - START_TOKENS - len(request.prefix_tokens)
        prompt = prompt[len(prompt) - max(0, min(len(prompt), room - LEAST_ROOM)) :]
        room = min(room - len(prompt), self._n_text_ctx // 2)
        wanted = (
            room if request.is_final else LEAST_TOKENS + round(TOKENS_PER_S * request.new_audio_s)
        )
        return DecodeOptions(
            language=self._language(request),
            timestamps=True,
            prompt_tokens=prompt,
            temperatures=LADDER if request.is_final else (0.0,),
            max_new_tokens=max(1, min(room, wanted)),
            gates=PARALLEL_GATES if request.is_final else UPDATE_GATES,
            prefix_tokens=request.prefix_tokens,
            peaks=with_peaks,
        )

    def _language(self, request: UpdateRequest) -> str | None:
        if not self._tokenizer.is_multilingual:
            return "en"
        if request.config.language is None and len(request.config.languages) == 1:
            return request.config.languages[0]
        return request.language or request.config.language

    def _is_trusted(self, result: DecodeResult, prefix_tokens: Sequence[int]) -> bool:
        gates = PARALLEL_GATES
        if repeats_itself(gates, result.compression_ratio):
            return False
        return bool(prefix_tokens) or not is_silence(
            gates, result.avg_logprob, result.no_speech_prob
        )
