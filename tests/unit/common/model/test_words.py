"""Words are openai/whisper's, on its own vocabularies; what is no text is never lost."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.model.text.words import split_words
from tests.support.checkpoints import cached_checkpoint
from tests.support.references.openai_vocabulary import openai_tokenizer, with_openai_vocabulary

TEXTS = {
    "en": ' Hello, world! It\'s 3:45 -- (really) "quoted"... and so on: [music] e.g. $5.00?!',
    "de": ' Straße, Äpfel und "Grüße" aus Köln: naïve café…',
    "ru": " Привет, мир! Как дела?",
    "hi": " नमस्ते दुनिया, यह एक परीक्षण है।",
    "ko": " 안녕하세요, 세계! 잘 지냈어요?",
    "zh": "你好，世界！今天天气很好。𠜎𠜱",
    "ja": "こんにちは、世界。元気ですか？Whisperです。",
    "th": " สวัสดีชาวโลก",
    "lo": "ສະບາຍດີຊາວໂລກ",
    "my": "မင်္ဂလာပါ ကမ္ဘာ",
    "yue": "你好，世界！食咗飯未呀？",
    "ar": " مرحبا بالعالم، كيف حالك؟",
}
MIXED = st.text(
    st.one_of(
        st.sampled_from(" .,!?'-()\"…。、😀日本語éßнا\n"),
        st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"),
    ),
    max_size=40,
)


def assert_equal_words(text: str, language: str, multilingual: bool = True) -> None:
    theirs = openai_tokenizer(language, multilingual)
    tokens = theirs.encoding.encode_ordinary(text)
    found = split_words(tokens, with_openai_vocabulary(multilingual), language)
    texts, groups = theirs.split_to_word_tokens([*tokens, theirs.eot])
    assert [word.text for word in found] == texts[:-1]
    assert [list(word.tokens) for word in found] == groups[:-1]


@pytest.mark.parametrize("language", TEXTS)
def test_words_are_the_references(language: str) -> None:
    for text in TEXTS.values():
        assert_equal_words(text, language)


def test_words_of_english_checkpoints_are_the_references() -> None:
    for text in TEXTS.values():
        assert_equal_words(text, "en", multilingual=False)


@settings(deadline=None, max_examples=100)
@given(MIXED, st.sampled_from(["en", "ja"]))
def test_words_of_any_text_are_the_references(text: str, language: str) -> None:
    assert_equal_words(text, language)


@settings(deadline=None)
@given(st.lists(st.integers(0, 270), max_size=30), st.sampled_from(["en", "zh"]))
def test_every_token_is_in_one_word_whatever_its_bytes(tokens: list[int], language: str) -> None:
    """Random bytes, mostly no characters at all."""
    tokenizer = micro_tokenizer()
    words = split_words(tokens, tokenizer, language)
    assert [token for word in words for token in word.tokens] == tokens
    assert "".join(word.text for word in words) == tokenizer.decode(tokens)


def test_a_text_that_ends_inside_a_character_ends_with_a_replacement() -> None:
    tokenizer = micro_tokenizer()
    tokens = tokenizer.encode(" a 😀")[:-1]  # four bytes, each a token
    words = split_words(tokens, tokenizer, "en")
    assert [(word.text, len(word.tokens)) for word in words] == [(" a", 1), (" \ufffd", 4)]


@functools.cache
def micro_tokenizer() -> WhisperTokenizer:
    return WhisperTokenizer.from_checkpoint(open_checkpoint(str(cached_checkpoint("micro"))))
