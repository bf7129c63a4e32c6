"""After an attempt at a window: is another temperature tried, which one stands, and its message.

openai/whisper's temperature fallback (`transcribe.py`), with faster-whisper's choice among failed
attempts as a setting. Where the encoder's context was trimmed, a greedy attempt that fails asks for
the full one instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.common.messages import DecodeResult, DecodeTimings, QualityGates
from cluster.common.model.encoder_context import positions_of
from cluster.common.model.text.quality import is_silence, needs_fallback, repeats_itself
from decoder_worker.scheduling.sequence import Attempt, DecodeSequence


def finished_result(sequence: DecodeSequence, now: float, *, doubted: bool = False) -> DecodeResult:
    """The sequence is RUNNING, its attempts are made.

    now: monotonic seconds. doubted: as in `DecodeResult`.
    """
    assert sequence.language is not None
    index = chosen_attempt(sequence)
    attempt = sequence.attempts[index]
    hypothesis = attempt.hypothesis
    return DecodeResult(
        request_id=sequence.request.request_id,
        window=sequence.request.window,
        tokens=hypothesis.tokens,
        token_logprobs=hypothesis.logprobs,
        avg_logprob=hypothesis.avg_logprob,
        no_speech_prob=sequence.no_speech_prob,
        language=sequence.language,
        temperature=attempt.temperature,
        finish_reason="stop" if hypothesis.ended else "length",
        timings=_timings(sequence, now),
        compression_ratio=attempt.compression_ratio,
        attempt=index,
        alignment=sequence.alignment,
        doubted=doubted,
        peak_positions=sequence.peaks,
    )


def language_result(sequence: DecodeSequence, now: float) -> DecodeResult:
    """The answer to `detect_only`: the language and its log probability, and no text."""
    assert sequence.language is not None
    return DecodeResult(
        request_id=sequence.request.request_id,
        window=sequence.request.window,
        tokens=(),
        token_logprobs=(),
        avg_logprob=sequence.language_logprob,
        no_speech_prob=0.0,
        language=sequence.language,
        temperature=0.0,
        finish_reason="stop",
        timings=_timings(sequence, now),
    )


def _timings(sequence: DecodeSequence, now: float) -> DecodeTimings:
    assert sequence.fetched is not None
    fetched = sequence.fetched
    prefill_started = sequence.prefill_started or now
    decode_started = sequence.decode_started or now
    return DecodeTimings(
        queue_s=sequence.load_started - sequence.arrived,
        transfer_s=fetched.seconds,
        transfer_bytes=fetched.n_bytes,
        transport=fetched.transport,
        prefill_s=decode_started - prefill_started,
        decode_s=now - decode_started,
        steps=sequence.steps,
        batch_wait_s=prefill_started - sequence.loaded,
    )


def is_doubted(sequence: DecodeSequence, timestamp_begin: int) -> bool:
    """Whether the last attempt, from a trimmed context, asks for the full one.

    Where it fails by the usual gates, or where it has a timestamp past the audio: a decoder that
    misses the rest of the padding tends to say the last sentence once more, and stamps it there. A
    text that would be left out as silence is doubted too, so that no speech is lost to a short
    context alone. A sampled text fails the gates by the dice of its own temperature, so for it they
    lead to the next temperature as ever.
    """
    attempt = sequence.attempts[-1]
    last = timestamp_begin + positions_of(sequence.request.content_frames)
    if any(token > last for token in attempt.hypothesis.tokens):
        return True
    gates, avg_logprob = sequence.options.gates, attempt.hypothesis.avg_logprob
    is_greedy = attempt.temperature == 0.0
    return (is_greedy and _failed(attempt, gates, no_speech_prob=0.0)) or is_silence(
        gates, avg_logprob, sequence.no_speech_prob
    )


def is_final(sequence: DecodeSequence) -> bool:
    """Whether the last attempt passed, or was the last that there is."""
    attempts, options = sequence.attempts, sequence.options
    if len(attempts) >= len(options.temperatures):
        return True
    return not _failed(attempts[-1], options.gates, sequence.no_speech_prob)


def chosen_attempt(sequence: DecodeSequence) -> int:
    """The index of the attempt that stands, of those made."""
    attempts, gates = sequence.attempts, sequence.options.gates
    last = len(attempts) - 1
    if gates.keep == "last" or not _failed(attempts[last], gates, sequence.no_speech_prob):
        return last
    return _best(attempts, gates)


def _failed(attempt: Attempt, gates: QualityGates, no_speech_prob: float) -> bool:
    return needs_fallback(
        gates, attempt.compression_ratio, attempt.hypothesis.avg_logprob, no_speech_prob
    )


def _best(attempts: Sequence[Attempt], gates: QualityGates) -> int:
    varied = [i for i, a in enumerate(attempts) if not repeats_itself(gates, a.compression_ratio)]
    return max(varied or range(len(attempts)), key=lambda i: attempts[i].hypothesis.avg_logprob)
