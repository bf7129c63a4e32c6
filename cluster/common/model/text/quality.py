"""openai/whisper's rules for decoding a window again and for taking it as silence."""

from __future__ import annotations

import zlib

from cluster.common.messages import QualityGates


def compression_ratio(text: str) -> float:
    encoded = text.encode()
    return len(encoded) / len(zlib.compress(encoded))


def needs_fallback(
    gates: QualityGates, ratio: float, avg_logprob: float, no_speech_prob: float
) -> bool:
    failed = repeats_itself(gates, ratio) or is_unsure(gates, avg_logprob)
    is_quiet = gates.no_speech_prob is not None and no_speech_prob > gates.no_speech_prob
    return failed and not (is_quiet and is_unsure(gates, avg_logprob))


def repeats_itself(gates: QualityGates, ratio: float) -> bool:
    return gates.compression_ratio is not None and ratio > gates.compression_ratio


def is_unsure(gates: QualityGates, avg_logprob: float) -> bool:
    return gates.avg_logprob is not None and avg_logprob < gates.avg_logprob


def is_silence(gates: QualityGates, avg_logprob: float, no_speech_prob: float) -> bool:
    """Whether the model hears no speech and is not sure of its text."""
    if gates.no_speech_prob is None or no_speech_prob <= gates.no_speech_prob:
        return False
    return gates.avg_logprob is None or avg_logprob <= gates.avg_logprob
