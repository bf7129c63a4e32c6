"""Codes, names and what people write instead of them."""

from __future__ import annotations

import pytest

from cluster.common.model.text.languages import language_code, language_name


@pytest.mark.parametrize(
    ("text", "code"),
    [("en", "en"), ("English", "en"), (" GERMAN ", "de"), ("pt-BR", "pt"), ("zh_TW", "zh"),
     ("castilian", "es"), ("haitian creole", "ht"), ("yue", "yue"), ("iw", "he"),
     ("klingon", None), ("", None)],
)  # fmt: skip
def test_codes_are_found(text: str, code: str | None) -> None:
    assert language_code(text) == code


def test_names() -> None:
    assert language_name("yue") == "cantonese"
    assert language_name("xx") == "xx"
