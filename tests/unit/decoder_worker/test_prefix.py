"""A prefix is taken for tokens that were sampled: what follows is the rest of a free decode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.common.errors import UnsupportedValueError
from cluster.common.messages import DecodeOptions, DecodeResult, QualityGates
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from decoder_worker.prompts import PromptBuilder
from tests.support.checkpoints import cached_checkpoint
from tests.support.workers.decoder_engines import Stand, make_stand

CHECKPOINT = open_checkpoint(str(cached_checkpoint("micro")))
TOKENIZER = WhisperTokenizer.from_checkpoint(CHECKPOINT)
N_TEXT_CTX = CHECKPOINT.dims.n_text_ctx

FREE: dict[str, dict[str, Any]] = {
    "with timestamps": {},
    "without timestamps": {"timestamps": False},
    "behind a context": {"prompt_tokens": tuple(range(100, 180))},
    "of an unknown language": {"language": None},
    "sampled": {"temperatures": (0.7,), "seed": 3},
}


@pytest.fixture(scope="module", params=[False, True], ids=["ragged", "bucketed"])
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    """bucketed: by the buckets of a GPU, without its graphs."""
    with make_stand(cached_checkpoint("micro"), bucketed=request.param, max_batch=6) as stand:
        yield stand
        stand.assert_all_returned()


def decode(stand: Stand, seed: int = 0, **options: Any) -> DecodeResult:
    return stand.decode(seed, **{"max_new_tokens": 16, **options})


@pytest.mark.parametrize("name", FREE)
def test_behind_any_part_of_a_free_decode_comes_its_rest(stand: Stand, name: str) -> None:
    free = decode(stand, **FREE[name])
    assert len(free.tokens) == 16
    for n in (1, 2, 7, 15):
        options = {**FREE[name], "prefix_tokens": free.tokens[:n], "max_new_tokens": 16 - n}
        behind = decode(stand, **options)
        assert behind.tokens == free.tokens[n:], f"behind {n} tokens"
        assert behind.token_logprobs == pytest.approx(free.token_logprobs[n:], abs=1e-4)
        assert behind.no_speech_prob == pytest.approx(free.no_speech_prob, rel=1e-3)
        assert behind.language == free.language


def test_beams_and_candidates_grow_behind_a_prefix(stand: Stand) -> None:
    prefix = decode(stand).tokens[:5]
    one = decode(stand, prefix_tokens=prefix, max_new_tokens=1, beam_size=4)
    greedy = decode(stand, prefix_tokens=prefix, max_new_tokens=1)
    assert one.tokens == greedy.tokens
    assert one.avg_logprob == pytest.approx(greedy.avg_logprob, abs=1e-4)
    for options in ({"beam_size": 4}, {"temperatures": (0.8,), "best_of": 4}):
        found = decode(stand, prefix_tokens=prefix, **options)
        assert len(found.tokens) == len(found.token_logprobs) == 16


def test_a_text_that_only_repeats_its_prefix_is_known_by_its_compression(stand: Stand) -> None:
    repeated = tuple(TOKENIZER.encode(" the" * 20))
    found = decode(stand, timestamps=False, prefix_tokens=repeated, max_new_tokens=1)
    assert len(found.tokens) <= 1
    assert found.compression_ratio > 2.4


def test_words_are_told_of_the_prefix_too(stand: Stand) -> None:
    prefix = tuple(TOKENIZER.encode(" the thing"))
    gates = QualityGates(None, None, None)
    options: dict[str, Any] = {"timestamps": False, "words": True, "gates": gates}
    found = decode(stand, prefix_tokens=prefix, max_new_tokens=5, **options)
    assert found.alignment is not None
    assert found.alignment.tokens == (*prefix, *found.tokens)


def test_the_longest_context_and_a_long_prefix_fill_the_text_context(stand: Stand) -> None:
    context = tuple(range(300))
    prefix = tuple(range(200, 400))
    found = decode(stand, prompt_tokens=context, prefix_tokens=prefix, max_new_tokens=400)
    n_prompt = N_TEXT_CTX // 2 + 3 + len(prefix)  # context, start sequence, prefix
    assert len(found.tokens) <= N_TEXT_CTX + 1 - n_prompt
    assert found.finish_reason == "stop" or len(found.tokens) == N_TEXT_CTX + 1 - n_prompt


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefix_tokens": (5, -1)}, "-1 is not in the vocabulary"),
        ({"prefix_tokens": (TOKENIZER.n_vocab,)}, "is not in the vocabulary"),
        ({"prefix_tokens": (5, TOKENIZER.special.eot)}, "nothing can follow"),
        ({"prefix_tokens": (5,) * 225}, "more than the 224"),
        ({"prefix_tokens": (5,) * 222, "prompt_tokens": (5,) * 223}, "leave no room"),
    ],
)
def test_a_prefix_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    prompts = PromptBuilder(TOKENIZER, CHECKPOINT.dims)
    with pytest.raises(UnsupportedValueError, match=said) as caught:
        prompts.check(DecodeOptions(language="en", **options))
    assert caught.value.param == "prefix"


def test_the_most_of_prefix_and_context_that_fits_is_taken() -> None:
    prompts = PromptBuilder(TOKENIZER, CHECKPOINT.dims)
    options = DecodeOptions(language="en", prefix_tokens=(5,) * 221, prompt_tokens=(5,) * 223)
    prompts.check(options)
    assert prompts.n_new_max(options) == 1
    assert len(prompts.prompt(options, "en").tokens) == N_TEXT_CTX
    for n_context, most in ((0, 224), (300, N_TEXT_CTX + 1 - (1 + 223 + 3))):  # by default half
        assert prompts.n_new_max(DecodeOptions(prompt_tokens=(5,) * n_context)) == most
