"""Text, ids and start sequences equal Hugging Face's tokenizer for every vocabulary size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.common.errors import CheckpointError, UnsupportedValueError
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from tests.support.checkpoints import SHAPES, cached_checkpoint, make_checkpoint, special_tokens

VOCABULARIES = ["micro", "tiny", "tiny.en", "large-v3"]
TEXTS = [
    " and the other thing",
    "  two  spaces\tand a tab\n",
    " naïve café, 日本語, 😀 and ♪ music",
    " it's 3:45 -- (really) 'quoted'",
    "",
]


def load(folder: Path) -> WhisperTokenizer:
    return WhisperTokenizer.from_checkpoint(open_checkpoint(str(folder)))


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    content |= changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))


@pytest.mark.parametrize("shape", VOCABULARIES)
def test_text_equals_the_reference(shape: str) -> None:
    from transformers import WhisperTokenizer as Reference

    folder = cached_checkpoint(shape)
    tokenizer, reference = load(folder), Reference.from_pretrained(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("shape", VOCABULARIES)
def test_every_id_is_read_from_the_files(shape: str) -> None:
    tokenizer, expected = load(cached_checkpoint(shape)), special_tokens(SHAPES[shape])
    special = tokenizer.special
    names = {
        "eot": "<|endoftext|>",
        "sot": "<|startoftranscript|>",
        "translate": "<|translate|>",
        "transcribe": "<|transcribe|>",
        "sot_lm": "<|startoflm|>",
        "sot_prev": "<|startofprev|>",
        "no_speech": SHAPES[shape].no_speech,
        "no_timestamps": "<|notimestamps|>",
        "timestamp_begin": "<|0.00|>",
    }
    for field, name in names.items():
        assert getattr(special, field) == expected[name], name
    assert special.timestamp_end == expected["<|30.00|>"] == SHAPES[shape].n_vocab - 1
    assert special.n_timestamps == 1501
    assert len(special.languages) == SHAPES[shape].n_languages
    assert all(expected[f"<|{code}|>"] == token for code, token in special.languages.items())


def test_start_sequences() -> None:
    multilingual = load(cached_checkpoint("large-v3"))
    assert multilingual.is_multilingual
    assert multilingual.languages[-1] == "yue"
    assert multilingual.sot_sequence("de", "translate", True) == (50258, 50261, 50359)
    assert multilingual.sot_sequence("en", "transcribe", False) == (50258, 50259, 50360, 50364)
    english = load(cached_checkpoint("tiny.en"))
    assert not english.is_multilingual
    assert english.languages == ("en",)
    assert english.sot_sequence("en", "transcribe", True) == (50257,)
    assert english.sot_sequence("en", "transcribe", False) == (50257, 50362)


def test_a_language_or_task_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="no language 'yue'") as refused:
        load(cached_checkpoint("tiny")).sot_sequence("yue", "transcribe", True)
    assert refused.value.param == "language"
    english = load(cached_checkpoint("tiny.en"))
    with pytest.raises(UnsupportedValueError, match="English only"):
        english.sot_sequence("de", "transcribe", True)
    with pytest.raises(UnsupportedValueError, match="cannot translate"):
        english.sot_sequence("en", "translate", True)


def test_special_tokens_in_a_text_stay_text() -> None:
    tokenizer = load(cached_checkpoint("tiny"))
    text = " <|endoftext|><|0.00|><|en|>"
    ids = tokenizer.encode(text)
    assert max(ids) < tokenizer.special.eot
    assert tokenizer.decode(ids) == text


def test_decode_skips_specials_and_survives_broken_characters() -> None:
    tokenizer = load(cached_checkpoint("tiny"))
    special = tokenizer.special
    pieces = tokenizer.encode(" é")
    tokens = [special.sot, special.timestamp_begin, *pieces, special.timestamp_end, special.eot]
    assert tokenizer.decode(tokens) == " é"
    assert tokenizer.decode(pieces[:-1]) == " \ufffd"
    assert tokenizer.decode_bytes(pieces[:-1]) == " é".encode()[:-1]
    assert tokenizer.decode([10**6]) == ""


def test_timestamps_count_in_steps_of_20_ms() -> None:
    tokenizer = load(cached_checkpoint("tiny"))
    begin = tokenizer.special.timestamp_begin
    n_steps = tokenizer.special.timestamp_end - begin
    assert n_steps * tokenizer.timestamp_step_s == pytest.approx(30.0)
    assert tokenizer.is_timestamp(begin)
    assert not tokenizer.is_timestamp(begin - 1)
    assert tokenizer.language_of(tokenizer.special.languages["fr"]) == "fr"
    assert tokenizer.language_of(begin) is None


def test_suppress_lists_are_the_checkpoint_s(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    edit(folder / "generation_config.json", suppress_tokens=[5, 3], begin_suppress_tokens=[])
    tokenizer = load(folder)
    assert tokenizer.suppress_tokens == (3, 5)
    assert tokenizer.begin_suppress_tokens == ()


def test_without_lists_the_vocabulary_decides(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    edit(folder / "generation_config.json", suppress_tokens=None, begin_suppress_tokens="gone")
    tokenizer = load(folder)
    special = tokenizer.special
    one_token = [tokenizer.encode(symbol)[0] for symbol in '"#()*+/:;<=>@[\\]^_`{|}~']
    words = [tokenizer.encode(text)[0] for text in (" -", " '")]
    notes = tokenizer.encode("♪")[:1]
    never = [special.sot, special.translate, special.transcribe, special.sot_lm]
    never += [special.sot_prev, special.no_speech]
    assert tokenizer.suppress_tokens == tuple(sorted({*one_token, *words, *notes, *never}))
    assert tokenizer.encode("-")[0] not in tokenizer.suppress_tokens
    assert tokenizer.encode(" ")[0] not in tokenizer.suppress_tokens
    assert tokenizer.begin_suppress_tokens == (tokenizer.encode(" ")[0], special.eot)


def test_minus_one_in_a_list_stands_for_the_symbols(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    edit(folder / "generation_config.json", suppress_tokens=[-1, 77])
    tokenizer = load(folder)
    assert {77, tokenizer.encode("[")[0]} <= set(tokenizer.suppress_tokens)
    assert tokenizer.special.sot not in tokenizer.suppress_tokens


def test_older_files_without_tokenizer_json(tmp_path: Path) -> None:
    """vocab.json, merges.txt and added_tokens.json, with the timestamps implied."""
    folder = make_checkpoint(tmp_path)
    expected = load(folder)
    definition = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(definition["model"]["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in definition["model"]["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    added = {t["content"]: t["id"] for t in definition["added_tokens"] if "." not in t["content"]}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    found = load(folder)
    assert found.special == expected.special
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text)


@pytest.mark.parametrize(("shape", "multilingual"), [("tiny", True), ("tiny.en", False)])
def test_multilingual_is_told_without_a_generation_config(
    tmp_path: Path, shape: str, multilingual: bool
) -> None:
    folder = make_checkpoint(tmp_path, shape, d_model=32, n_head=2)
    (folder / "generation_config.json").unlink()
    assert load(folder).is_multilingual is multilingual
    special = special_tokens(SHAPES[shape])
    forced = [[1, special["<|en|>"]], [2, special["<|transcribe|>"]]] if multilingual else []
    forced.append([len(forced) + 1, special["<|notimestamps|>"]])
    edit(folder / "config.json", forced_decoder_ids=forced)
    assert load(folder).is_multilingual is multilingual


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    definition = json.loads((folder / "tokenizer.json").read_text())
    edit(folder / "config.json", vocab_size=100)
    with pytest.raises(CheckpointError, match=r"does not fit config.json"):
        load(folder)
    without = [t for t in definition["added_tokens"] if t["content"] != "<|startofprev|>"]
    edit(folder / "tokenizer.json", added_tokens=without)
    with pytest.raises(CheckpointError, match=r"has no <\|startofprev\|>"):
        load(folder)
    edit(folder / "tokenizer.json", model={"type": "Unigram", "vocab": []})
    with pytest.raises(CheckpointError, match="byte-level BPE"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither tokenizer.json nor vocab.json"):
        load(folder)
