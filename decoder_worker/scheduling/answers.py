"""Turns a sequence that has ended into the message that its caller gets."""

from __future__ import annotations

from cluster.common.messages import DecodeResult, DecodeTimings
from decoder_worker.scheduling.fallback import chosen_attempt
from decoder_worker.scheduling.sequence import DecodeSequence


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
