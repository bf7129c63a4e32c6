"""Forms of transcription requests, parsed by the server's own parser, and their refusals."""

from __future__ import annotations

import pytest

from cluster.common.errors import InvalidRequestError
from router.api.forms import parse_transcription
from router.api.params import TranscriptionParams

LANGUAGES = ("en", "de", "my")
VERBOSE = ("response_format", "verbose_json")
SEQUENTIAL = ("decoding", "sequential")


Field = tuple[str, str]


def parse(*fields: Field) -> TranscriptionParams:
    return parse_transcription([("model", "whisper-1"), *fields], LANGUAGES)


def refusal(*fields: Field) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parse(*fields)
    return caught.value
