"""Which tokens are certain: by attention, by agreement, and always in whole words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cluster.common.messages import SAMPLE_RATE
from cluster.common.model.dims import ModelDims
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.tracing import NO_SPAN
from router.live.interface import LiveConfig
from router.live.partial_transcript import (
    AttentionPeak,
    Hypothesis,
    LocalAgreement,
    PartialTranscript,
    Policy,
    chosen_policy,
    whole_words,
)
from router.live.turns import Token, Turn, Utterance
from tests.support.live.virtual_sessions import micro_tokenizer

END = 200  # positions of the audio: 4 s


@pytest.fixture(scope="module")
def tokenizer() -> WhisperTokenizer:
    return micro_tokenizer()


def heard(tokenizer: WhisperTokenizer, text: str, *, last_peak: int = END - 60) -> Hypothesis:
    """A hypothesis whose tokens look ever later, up to `last_peak`."""
    tokens = (tokenizer.special.timestamp_begin, *tokenizer.encode(text))
    step = last_peak // (len(tokens) - 1)
    return made(tokens, [last_peak - step * (len(tokens) - 1 - n) for n in range(len(tokens))])


def made(
    tokens: Sequence[int], peaks: Sequence[int | None] | None = None, language: str = "en"
) -> Hypothesis:
    peaks = peaks or [None] * len(tokens)
    heard = tuple(Token(id, -0.1, peak) for id, peak in zip(tokens, peaks, strict=True))
    return Hypothesis(heard, END, language)


def told(
    tokenizer: WhisperTokenizer,
    policy: Policy,
    new: Hypothesis,
    last: Hypothesis | None = None,
    attended_to: int = 0,
) -> str:
    n = policy.count_confirmed(new, last, tokenizer.special.eot, attended_to)
    n = whole_words(tokenizer, new.tokens, n, new.language)
    return tokenizer.decode([token.id for token in new.tokens[:n]])


def test_what_attention_finds_in_the_last_half_second_waits(tokenizer: WhisperTokenizer) -> None:
    tokens = tuple(tokenizer.encode(" one")) + tuple(tokenizer.encode(" two"))
    one = len(tokenizer.encode(" one"))
    for peak, text in ((END - 26, " one two"), (END - 25, " one"), (END - 1, " one")):
        new = made(tokens, (50,) * one + (peak,) * (len(tokens) - one))
        assert told(tokenizer, AttentionPeak(0.5), new) == text


def test_attention_that_jumps_back_has_lost_its_place(tokenizer: WhisperTokenizer) -> None:
    one, two = tokenizer.encode(" one"), tokenizer.encode(" two")
    new = made((*one, *two), (150,) * len(one) + (10,) * len(two))
    assert told(tokenizer, AttentionPeak(), new) == " one"
    assert told(tokenizer, AttentionPeak(), new, attended_to=260) == ""


def test_a_full_stop_waits_for_what_follows(tokenizer: WhisperTokenizer) -> None:
    assert told(tokenizer, AttentionPeak(), heard(tokenizer, " one two.")) == " one two"
    more = heard(tokenizer, " one two. three")
    assert told(tokenizer, AttentionPeak(), more) == " one two. three"
    assert told(tokenizer, AttentionPeak(), heard(tokenizer, ".")) == ""


def test_agreement_needs_two_updates(tokenizer: WhisperTokenizer) -> None:
    new, last = heard(tokenizer, " one two three"), heard(tokenizer, " one two tree")
    assert told(tokenizer, LocalAgreement(), new) == ""
    assert told(tokenizer, LocalAgreement(), new, last) == " one two"
    first, *rest = new.tokens
    later = replace(new, tokens=(replace(first, id=first.id + 7), *rest))
    assert told(tokenizer, LocalAgreement(), new, later) == " one two three"


def test_words_are_told_whole(tokenizer: WhisperTokenizer) -> None:
    for text in (" extraordinary things", " it's nine o'clock", " one-two three"):
        tokens = tokenizer.encode(text)
        words = text.split()
        allowed = {"", *(" " + " ".join(words[: n + 1]) for n in range(len(words)))}
        for n in range(len(tokens) + 1):
            whole = whole_words(tokenizer, made(tokens).tokens, n, "en")
            assert tokenizer.decode(tokens[:whole]) in allowed


def test_text_without_spaces_is_told_by_whole_characters(tokenizer: WhisperTokenizer) -> None:
    tokens = tokenizer.encode("日本語です")
    heard = made(tokens).tokens
    for n in range(len(tokens) + 1):
        kept = tokenizer.decode_bytes(tokens[: whole_words(tokenizer, heard, n, "ja")])
        assert "日本語です".encode().startswith(kept)
        kept.decode()
    assert whole_words(tokenizer, heard, len(tokens), "ja") == len(tokens)


@pytest.mark.parametrize(
    ("choice", "layers", "expected"),
    [
        ("auto", (32, 32), AttentionPeak()),
        ("auto", (32, 4), LocalAgreement()),  # large-v3-turbo
        ("auto", (4, 3), AttentionPeak()),
        ("attention_peak", (32, 4), AttentionPeak()),
        ("local_agreement", (4, 4), LocalAgreement()),
    ],
)
def test_the_policy_follows_setting_and_checkpoint(
    choice: str, layers: tuple[int, int], expected: Policy
) -> None:
    dims = ModelDims(
        n_mels=80, n_vocab=51865, n_audio_ctx=1500, n_audio_state=64, n_audio_head=2,
        n_audio_layer=layers[0], n_audio_ffn=256, n_text_ctx=448, n_text_state=64, n_text_head=2,
        n_text_layer=layers[1], n_text_ffn=256,
    )  # fmt: skip
    assert chosen_policy(choice, dims) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "anywhere", "first"),
    [
        (" One two. Three. Four", False, "One two. Three."),
        ("はい。そうです。また", False, "はい。そうです。"),
        ("はい！そうですまた", False, "はい！"),
        ("はい", False, None),
        ("はい", True, "は"),
    ],
)
def test_long_speech_is_cut_at_the_last_sentence_or_else_in_a_quiet_place(
    text: str, anywhere: bool, first: str | None, tokenizer: WhisperTokenizer
) -> None:
    turn = Turn(0, 0, LiveConfig(), NO_SPAN, language="en" if text.isascii() else "ja")
    partial = PartialTranscript(Utterance(turn, 0), AttentionPeak(), tokenizer)
    stamp, *said = heard(tokenizer, text).tokens
    partial.add_final(Hypothesis((replace(stamp, peak=None), *said), END, turn.language or ""))
    segments = partial.cut(np.zeros(4 * SAMPLE_RATE, np.int16), anywhere=anywhere)
    assert [segment.text for segment in segments] == ([] if first is None else [first])
