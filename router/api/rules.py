"""How the fields of a request go together: what could not be honoured is refused by name.

A client learns from a 400 what it would otherwise miss in the text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from cluster.errors import InvalidRequestError, UnsupportedValueError
from router.api.kinds import shown
from router.api.params import TranscriptionParams
from router.api.request_fields import FIELDS

Conflicts = Iterator[tuple[str, str]]  # the field to change, and why


def check_fields(params: TranscriptionParams, sent: Collection[str]) -> None:
    """Whether the fields go together. `sent`: the names of those that came with a content.

    Raises:
        InvalidRequestError: two of them do not, or one would have no effect.
    """
    for rule in (_decoding_conflicts, _search_conflicts, _answer_conflicts):
        for name, message in rule(params, sent):
            raise InvalidRequestError(message, param=name, code="incompatible_parameters")


def check_model(params: TranscriptionParams, languages: Collection[str]) -> None:
    """Refuse what a model that knows `languages` cannot do. Raises UnsupportedValueError."""
    if params.task == "translate" and len(languages) == 1:
        raise UnsupportedValueError(
            f"model {shown(params.model)} supports English only and cannot translate; "
            f"ask for a transcription",
            param="model",
        )
    if params.language is not None and params.language not in languages:
        raise UnsupportedValueError(
            f"this model does not support the language {shown(params.language)}; "
            f"it knows: {', '.join(sorted(languages))}",
            param="language",
        )


def _decoding_conflicts(params: TranscriptionParams, sent: Collection[str]) -> Conflicts:
    if params.decoding == "parallel":
        for name in sent:
            if FIELDS[name].only_sequential:
                yield name, f"'{name}' needs decoding=sequential"
    elif params.chunking is not None:
        name = "chunking_strategy"
        yield name, f"'{name}' cuts at pauses, which decoding=sequential does not"
    if params.sequential.carry_initial_prompt and params.prompt is None:
        yield "carry_initial_prompt", "'carry_initial_prompt' needs a 'prompt'"


def _search_conflicts(params: TranscriptionParams, sent: Collection[str]) -> Conflicts:
    if "fallback" in sent and params.fallback and params.temperature > 0:
        yield "fallback", "'fallback' climbs from temperature 0; leave 'temperature' out"
    if params.beam_size > 1 and params.temperature > 0:
        yield "beam_size", "'beam_size' needs temperature 0; above it, use 'best_of'"
    if params.best_of > 1 and params.temperatures == (0.0,):
        yield "best_of", "'best_of' needs a temperature above 0, or 'fallback'"
    if "patience" in sent and params.beam_size == 1:
        yield "patience", "'patience' needs a 'beam_size' above 1"
    if params.length_penalty is not None and max(params.beam_size, params.best_of) == 1:
        yield "length_penalty", "'length_penalty' needs 'beam_size' or 'best_of' above 1"


def _answer_conflicts(params: TranscriptionParams, sent: Collection[str]) -> Conflicts:
    instead = f"not '{params.response_format}'"
    if params.words and params.response_format != "verbose_json":
        name = "timestamp_granularities"
        yield name, f"timestamp granularity 'word' needs response_format 'verbose_json', {instead}"
    if params.logprobs and params.response_format != "json":
        yield "include", f"'logprobs' needs response_format 'json', {instead}"
