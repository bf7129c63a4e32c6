"""The head in 8 bits leaves every choice what the weights themselves give."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.common.kernels.cpu.machine_code import as_array
from cluster.common.kernels.cpu.tile_registers import has_bfloat16_tiles, tile_config
from cluster.common.model.dims import ModelDims
from cluster.common.model.text.tokenizer import WhisperTokenizer
from decoder_worker.cpu.arrays import (
    coarse_head,
    fits_coarse,
    n_likely_units,
    plain_head,
)
from decoder_worker.cpu.likely_logits import run_likely
from decoder_worker.cpu.sampling_kernels import sample_rows
from decoder_worker.cpu.step_team import StepTeam
from decoder_worker.gpu.greedy import GpuSampler
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import Sampled, Sampler, TorchSampler
from decoder_worker.sampling.slots import SlotRows, SlotTable
from tests.support.workers.slot_states import N, filled_slots, make_tokenizer

D = 128
IN_TILES = pytest.mark.skipif(not has_bfloat16_tiles(), reason="needs a CPU with AMX's tiles")
WAYS = ["float16", pytest.param("tiles", marks=IN_TILES)]
LOGPROB_OFF = 0.01


class Way(NamedTuple):
    """Of computing it: in which dtype the head is held, and by tiles or not."""

    dtype: torch.dtype
    tiles: Any


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    in_tiles = request.param == "tiles"
    return Way(torch.bfloat16, tile_config()) if in_tiles else Way(torch.float16, None)


@pytest.fixture(scope="module")
def tokenizer() -> WhisperTokenizer:
    return make_tokenizer()


def likely(way: Way, weight: Tensor, x: Tensor, rules: LogitRules, threads: int = 2) -> Tensor:
    """float32 [n, n_vocab] of x [n, D]."""
    head, coarse = plain_head(weight, int8=False, tiles=way.tiles), coarse_head(weight, way.tiles)
    out = torch.full((len(x), len(weight)), torch.nan)
    masks = as_array(rules.never_or_not_first), as_array(rules.begin)
    job = partial(run_likely, as_array(x), head, coarse, *masks, rules.eot, as_array(out))
    StepTeam(threads - 1).run(job, n_likely_units(len(x), len(weight), rules.eot))
    return out


def exact(weight: Tensor, x: Tensor) -> Tensor:
    return (x.double() @ weight.double().t()).float()


def random_weight(tokenizer: WhisperTokenizer, seed: int, way: Way) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(tokenizer.n_vocab, D, generator=generator)
    if seed % 2:  # some inputs, and some words, with far larger weights than the others
        weight[:, ::17] *= 8
        weight[::5, 3] *= 30
    return (weight / 4).to(way.dtype)


@pytest.mark.parametrize("n_rows", [1, N])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_sampled_is_what_the_weights_give(
    way: Way, tokenizer: WhisperTokenizer, seed: int, n_rows: int
) -> None:
    """Of rows in every state of the rules, first tokens among them."""
    rules = LogitRules(tokenizer, 50, "cpu")
    weight = random_weight(tokenizer, seed, way)
    x = torch.randn(n_rows, D, generator=torch.Generator().manual_seed(100 + seed))
    found = []
    for logits in (exact(weight, x), likely(way, weight, x, rules)):
        slots = filled_slots(tokenizer, seed)
        sampler = TorchSampler(rules, slots)
        found.append((sampler(logits, slots.rows(torch.arange(n_rows)), None), slots.table))
    (expected, table), (ours, our_table) = found
    assert torch.equal(ours.tokens, expected.tokens)
    assert torch.equal(our_table, table)
    torch.testing.assert_close(ours.logprobs, expected.logprobs, rtol=0, atol=LOGPROB_OFF)


def test_words_that_8_bits_cannot_tell_apart_are_told_apart(
    way: Way, tokenizer: WhisperTokenizer
) -> None:
    """Hundreds of words, each a hair apart from the next one, in an order of chance."""
    rules = LogitRules(tokenizer, 50, "cpu")
    allowed = (rules.never_or_not_first[: rules.eot] == 0).nonzero().squeeze(1)
    x = torch.randn(1, D, generator=torch.Generator().manual_seed(3))
    weight = torch.zeros(tokenizer.n_vocab, D)
    weight[allowed] = x / x.norm()
    order = torch.randperm(len(allowed), generator=torch.Generator().manual_seed(4))
    nearly = (2**-9 if way.dtype == torch.bfloat16 else 2**-11) * order / len(order)
    weight[allowed, 0] += nearly.sign() * nearly * x[0, 0].sign()
    weight = weight.to(way.dtype)
    expected = exact(weight, x)
    masked = expected[:, : rules.eot] + rules.never_or_not_first[: rules.eot]
    best = masked.max()
    ours = likely(way, weight, x, rules)[:, : rules.eot]
    chosen = int((ours + rules.never_or_not_first[: rules.eot]).argmax())
    assert masked[0, chosen] == pytest.approx(best.item(), abs=1e-5)
    coarse = coarse_head(weight, None)
    same = np.unique(coarse.weight[allowed.numpy()], axis=0)
    assert len(same) < len(allowed) / 4, "8 bits told them apart: this tests nothing"


def test_what_ends_or_times_a_segment_is_always_exact(
    way: Way, tokenizer: WhisperTokenizer
) -> None:
    rules = LogitRules(tokenizer, 50, "cpu")
    weight = random_weight(tokenizer, 1, way)
    x = torch.randn(9, D, generator=torch.Generator().manual_seed(5))
    ours, expected = likely(way, weight, x, rules), exact(weight, x)
    torch.testing.assert_close(ours[:, rules.eot :], expected[:, rules.eot :], rtol=1e-4, atol=1e-4)
    begin = rules.begin
    torch.testing.assert_close(ours[:, begin], expected[:, begin], rtol=1e-4, atol=1e-4)
    words = (ours - expected)[:, : rules.eot].abs()
    bound = torch.from_numpy(coarse_head(weight).error)[: rules.eot] * x.norm(dim=1)[:, None]
    assert (words <= 1.01 * bound + 1e-4).all(), "a logit is off by more than its bound"
    assert words.max() > 1e-3, "all of it is exact: this tests nothing"


def test_a_row_is_the_same_whoever_helps_and_whatever_is_beside_it(
    way: Way, tokenizer: WhisperTokenizer
) -> None:
    rules = LogitRules(tokenizer, 50, "cpu")
    weight = random_weight(tokenizer, 0, way)
    x = torch.randn(9, D, generator=torch.Generator().manual_seed(6))
    together = likely(way, weight, x, rules, threads=5)
    for row in range(len(x)):
        assert torch.equal(
            likely(way, weight, x[row : row + 1], rules, threads=1)[0], together[row]
        )


def test_rows_of_zeros_and_of_nan_are_told(way: Way, tokenizer: WhisperTokenizer) -> None:
    rules = LogitRules(tokenizer, 50, "cpu")
    weight = random_weight(tokenizer, 0, way)
    x = torch.randn(4, D, generator=torch.Generator().manual_seed(7))
    x[1], x[2, 5], x[3, 9] = 0, torch.nan, torch.inf
    logits = likely(way, weight, x, rules)
    assert logits[0].isfinite().all()
    assert (logits[1] == 0).all()
    assert not logits[2:].isfinite().any()


@pytest.mark.parametrize("largest", [1e-15, 1e-18, 1e-25, 1e-33, 1e-37, 1e-40])
def test_rows_near_zero_neither_overflow_nor_change_a_choice(
    way: Way, tokenizer: WhisperTokenizer, largest: float
) -> None:
    """Down to where float32 keeps few digits, or none, of a value's square and of the value."""
    rules = LogitRules(tokenizer, 50, "cpu")
    weight = random_weight(tokenizer, 0, way)
    x = torch.randn(4, D, generator=torch.Generator().manual_seed(9))
    x[1:3] *= largest / x[1:3].abs().amax(1, keepdim=True)
    logits, alone = likely(way, weight, x, rules), likely(way, weight, x[[0, 3]], rules)
    assert logits.isfinite().all()
    assert torch.equal(logits[[0, 3]], alone), "the others are as they are without these rows"
    if largest > 1e-36:
        allowed = rules.never_or_not_first[: rules.eot]
        chosen, expected = (
            (each[1:3, : rules.eot] + allowed).argmax(1) for each in (logits, exact(weight, x))
        )
        assert torch.equal(chosen, expected)


def test_models_of_few_tokens_have_none() -> None:
    def dims(n_vocab: int, width: int) -> ModelDims:
        from tests.support.checkpoints import ModelShape, model_config

        return ModelDims.from_config(model_config(ModelShape(width, 2, 1, 1, n_vocab=n_vocab)))

    assert fits_coarse(dims(51_865, 512))
    assert not fits_coarse(dims(2_000, 512))


# ---- The compiled samplers give what torch's does: tokens, probabilities and slots.


MakeSampler = Callable[[WhisperTokenizer, SlotTable], Sampler]


def by_torch(tokenizer: WhisperTokenizer, slots: SlotTable) -> TorchSampler:
    return TorchSampler(LogitRules(tokenizer, 50, "cpu"), slots)


def compiled(tokenizer: WhisperTokenizer, slots: SlotTable) -> Sampler:
    """What a step of the CPU's decoder ends with."""
    rules = LogitRules(tokenizer, 50, "cpu")

    def sample(logits: Tensor, rows: SlotRows, noisy: Tensor | None, n_top: int = 0) -> Sampled:
        tokens, logprobs = torch.empty_like(rows.index), torch.empty(len(rows.index))
        read = (logits, rows.index, slots.table, rules.suppressed, rules.begin)
        arrays = [one.numpy() for one in read]
        job = partial(sample_rows, *arrays, rules.marks, tokens.numpy(), logprobs.numpy())
        StepTeam(1).run(job, len(tokens))
        return Sampled(tokens, logprobs)

    return sample


def of_a_gpu(tokenizer: WhisperTokenizer, slots: SlotTable) -> GpuSampler:
    rules = LogitRules(tokenizer, 50, "cpu")
    return GpuSampler(TorchSampler(rules, slots), rules, slots)


@pytest.mark.parametrize("own", [compiled, of_a_gpu])
@pytest.mark.parametrize("favoured", ["words", "text", "stamps", "end", "nothing"])
def test_a_choice_is_what_the_rules_and_argmax_give(
    tokenizer: WhisperTokenizer, favoured: str, own: MakeSampler
) -> None:
    special = tokenizer.special
    spans = {
        "words": slice(0, special.eot),
        "text": slice(special.eot, special.timestamp_begin),
        "stamps": slice(special.timestamp_begin, tokenizer.n_vocab),
        "end": slice(special.eot, special.eot + 1),
        "nothing": slice(0, 0),
    }
    for seed in range(4):
        logits = torch.randn(N, tokenizer.n_vocab, generator=torch.Generator().manual_seed(seed))
        logits[:, spans[favoured]] += 6.0 if seed % 2 else 2.0
        index = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
        found = []
        for make in (by_torch, own):
            slots = filled_slots(tokenizer, seed)
            sampled = make(tokenizer, slots)(logits.clone(), slots.rows(index), None)
            found.append((sampled.tokens, sampled.logprobs, slots.table))
        (tokens, logprobs, table), (ours, our_logprobs, our_table) = found
        assert torch.equal(ours, tokens)
        torch.testing.assert_close(our_logprobs, logprobs, rtol=1e-4, atol=2e-5)
        assert torch.equal(our_table, table)


@pytest.mark.parametrize("own", [compiled, of_a_gpu])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_finite_logits_says_so_and_leaves_others_alone(
    tokenizer: WhisperTokenizer, value: float, own: MakeSampler
) -> None:
    slots = filled_slots(tokenizer, 0)
    logits = torch.randn(3, tokenizer.n_vocab, generator=torch.Generator().manual_seed(1))
    logits[1, 77] = value
    logits[2] = value
    sampled = own(tokenizer, slots)(logits, slots.rows(torch.arange(3)), None)
    ruled_out = value == float("-inf")  # of one token that is only never chosen
    assert sampled.logprobs.isfinite().tolist() == [True, ruled_out, False]
    assert 0 <= int(sampled.tokens.min()) <= int(sampled.tokens.max()) < tokenizer.n_vocab
