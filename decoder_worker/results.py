"""Turn a sequence that came to its end into the message that its caller gets."""

from __future__ import annotations

from cluster.messages import DecodeResult, DecodeTimings, FinishReason
from decoder_worker.sequence import DecodeSequence


def finished_result(
    sequence: DecodeSequence, finish_reason: FinishReason, now: float
) -> DecodeResult:
    """`now` is monotonic seconds; the sequence is RUNNING, with its last token taken."""
    assert sequence.fetched is not None
    assert sequence.language is not None
    fetched = sequence.fetched
    timings = DecodeTimings(
        queue_s=sequence.load_started - sequence.arrived,
        transfer_s=fetched.seconds,
        transfer_bytes=fetched.n_bytes,
        transport=fetched.transport,
        prefill_s=sequence.decode_started - sequence.prefill_started,
        decode_s=now - sequence.decode_started,
        steps=sequence.steps,
    )
    return DecodeResult(
        request_id=sequence.request.request_id,
        window=sequence.request.window,
        tokens=tuple(sequence.tokens),
        token_logprobs=tuple(sequence.token_logprobs),
        avg_logprob=sequence.sum_logprob / (len(sequence.tokens) + 1),
        no_speech_prob=sequence.no_speech_prob,
        language=sequence.language,
        temperature=sequence.options.temperature,
        finish_reason=finish_reason,
        timings=timings,
    )
