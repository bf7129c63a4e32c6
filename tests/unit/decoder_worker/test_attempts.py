"""Temperatures, candidates, beams and single tokens, from one window's pages, beside others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.common.errors import UnsupportedValueError
from cluster.common.messages import DecodeResult, QualityGates
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.model.text.words import split_tokens
from tests.support.checkpoints import cached_checkpoint, make_checkpoint
from tests.support.workers.decoder_engines import (
    NEVER_GOOD,
    REQUESTS,
    Stand,
    make_stand,
)

LADDER = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
ALWAYS_GOOD = QualityGates(None, None, None)


@pytest.fixture
def stand() -> Iterator[Stand]:
    with make_stand(cached_checkpoint(), max_batch=8) as made:
        yield made
        made.assert_all_returned()


def test_a_failed_attempt_is_followed_by_the_next_temperature_from_the_same_kv(
    stand: Stand,
) -> None:
    result = stand.decode(temperatures=LADDER, gates=NEVER_GOOD)
    assert (result.temperature, result.attempt) == (1.0, 5)
    stats = stand.engine.stats()
    assert (stats.transfers, stats.fallbacks, stats.finished) == (1, 5, 1)


def test_an_attempt_that_passes_ends_the_ladder(stand: Stand) -> None:
    result = stand.decode(temperatures=LADDER, gates=ALWAYS_GOOD)
    assert (result.temperature, result.attempt) == (0.0, 0)
    assert result.tokens == stand.decode().tokens
    assert stand.engine.stats().fallbacks == 0


def test_silence_needs_no_further_attempt(stand: Stand) -> None:
    gates = QualityGates(compression_ratio=None, avg_logprob=0.0, no_speech_prob=0.0)
    assert stand.decode(temperatures=LADDER, gates=gates).attempt == 0


def test_the_best_attempt_stands_where_it_is_asked_for(stand: Stand) -> None:
    """All six fail; the likeliest stands, of all or of the three that are least compressible."""
    alone = [stand.decode(temperatures=LADDER[: n + 1], gates=NEVER_GOOD) for n in range(6)]
    assert [result.attempt for result in alone] == list(range(6))
    limit = sorted(result.compression_ratio for result in alone)[2]
    varied = [result for result in alone if result.compression_ratio <= limit]
    for most, choice in ((None, alone), (limit, varied)):
        gates = QualityGates(compression_ratio=most, avg_logprob=0.0, keep="best")
        best = stand.decode(temperatures=LADDER, gates=gates)
        likeliest = max(choice, key=lambda result: result.avg_logprob)
        assert (best.tokens, best.temperature) == (likeliest.tokens, likeliest.temperature)


def test_more_candidates_are_at_least_as_likely_as_one_of_them(stand: Stand) -> None:
    one = stand.decode(temperatures=(1.0,), seed=7)
    many = stand.decode(temperatures=(1.0,), seed=7, best_of=6)

    def score(result: DecodeResult) -> float:
        return result.avg_logprob * (len(result.tokens) + 1) / len(result.tokens)

    assert score(many) >= score(one) - 1e-6


def test_more_rows_than_the_batch_has_are_refused(stand: Stand) -> None:
    for options in ({"beam_size": 9}, {"best_of": 9, "temperatures": (0.0, 0.5)}):
        request = stand.request(**options)
        with pytest.raises(UnsupportedValueError, match="max_batch"):
            stand.engine.submit(request)
        stand.importer.accept(request.handle)
        stand.importer.drop(request.handle)


def test_a_language_is_found_among_those_that_it_may_be(stand: Stand) -> None:
    free = stand.decode(seed=5, language=None)
    only = stand.decode(seed=5, language=None, detect_only=True)
    assert (only.language, only.tokens) == (free.language, ())
    codes = WhisperTokenizer.from_checkpoint(stand.checkpoint).languages
    others = tuple(code for code in codes if code != free.language)
    asked = [{"languages": others}, {}, {"languages": (others[0], free.language)}]
    found = stand.decode_all([{"seed": 5, "language": None, **one} for one in asked])
    assert found[0].language in others
    assert found[0].tokens == stand.decode(seed=5, language=found[0].language).tokens
    assert [(one.language, one.tokens) for one in found[1:]] == [(free.language, free.tokens)] * 2


def test_no_language_is_found_that_the_checkpoint_does_not_list(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "languages": ["de"]}))
    with make_stand(folder, max_batch=8) as stand:
        asked = [{"seed": seed, "language": None, "detect_only": True} for seed in range(5)]
        assert {result.language for result in stand.decode_all(asked)} == {"de"}


def test_words_are_aligned_for_the_attempt_that_stands(stand: Stand) -> None:
    special = WhisperTokenizer.from_checkpoint(stand.checkpoint).special
    wanted = [{**options, "words": True} for options in REQUESTS]
    results = stand.decode_all((*wanted, *REQUESTS[:4]))
    for result in results[: len(wanted)]:
        alignment = result.alignment
        if alignment is None:
            pieces = split_tokens(result.tokens, special.timestamp_begin).pieces
            text = [token for piece in pieces for token in piece.tokens if token < special.eot]
            assert not text or result.no_speech_prob > 0.6
            continue
        assert set(alignment.tokens) <= set(result.tokens)
        assert len(alignment.times_s) == len(alignment.tokens) + 1
        assert list(alignment.times_s) == sorted(alignment.times_s)
    assert any(result.alignment for result in results)
    assert all(result.alignment is None for result in results[len(wanted) :])
