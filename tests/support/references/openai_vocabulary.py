"""openai/whisper's own vocabularies, in its tokenizer and in ours, to compare what both do."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

from whisper.tokenizer import Tokenizer, get_tokenizer

from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.model.text.vocabulary import _BYTE
from tests.support.checkpoints import SHAPES, make_checkpoint, tokenizer_definition


@functools.cache
def with_openai_vocabulary(multilingual: bool = True) -> WhisperTokenizer:
    shape = "tiny" if multilingual else "tiny.en"
    character = {byte: character for character, byte in _BYTE.items()}
    vocab = {
        "".join(character[byte] for byte in piece): rank
        for piece, rank in openai_tokenizer("en", multilingual).encoding._mergeable_ranks.items()
    }
    definition = tokenizer_definition(SHAPES[shape])
    definition["model"] |= {"vocab": vocab, "merges": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(folder, shape, d_model=8, n_head=1, encoder_layers=1, decoder_layers=1)
        (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
        return WhisperTokenizer.from_checkpoint(open_checkpoint(str(folder)))


@functools.cache
def openai_tokenizer(language: str, multilingual: bool = True) -> Tokenizer:
    return get_tokenizer(multilingual, num_languages=100, language=language)
