"""From states to logits: float32 sums, never rounded to the weights' 16 bits, in one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.model import DecoderTensors, TorchDecoder, WideHead
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import TorchSampler
from decoder_worker.sampling.slots import SlotTable
from decoder_worker.step import DecodeStep, Prompts
from tests.support.checkpoints import cached_checkpoint


class WideResults(TorchDispatchMode):
    """The dtypes of every result that is as wide as the vocabulary, views of weights left out."""

    def __init__(self, n_vocab: int, n_rows: int) -> None:
        super().__init__()
        self._shape = (n_rows, n_vocab)
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == self._shape:
            self.dtypes.append(result.dtype)
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_a_gpu_never_rounds_logits(dtype: torch.dtype) -> None:
    """On the meta device, which computes what a GPU does, without values."""
    checkpoint = open_checkpoint(str(cached_checkpoint()))
    tensors = DecoderTensors.load(checkpoint, dtype, "meta")
    pools = torch.empty(2, 1, 2, 2, 8, 2, 16, dtype=dtype, device="meta").unbind(0)
    decoder = TorchDecoder.of(tensors, TorchAttention(*pools))
    states = torch.empty(3, checkpoint.dims.n_text_state, dtype=dtype, device="meta")
    with WideResults(checkpoint.dims.n_vocab, 3) as results:
        logits = decoder.logits(states)
    assert logits.dtype == torch.float32
    assert set(results.dtypes) == {torch.float32}


def test_sums_are_those_of_float32() -> None:
    """Rounded to bfloat16, sums of about 8 would be off by up to 0.03."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(500, 64, generator=generator).bfloat16()
    x = torch.randn(3, 64, generator=generator).bfloat16()
    exact = x.double() @ weight.double().t()
    largest = (WideHead(weight)(x) - exact).abs().max().item()
    assert largest < 1e-4
    assert (exact.bfloat16() - exact).abs().max().item() > 1e-2


def test_a_prompt_reads_the_heads_weights_once() -> None:
    """The start of transcript, for its probability of no speech, and the last token together."""
    tokenizer = WhisperTokenizer.from_checkpoint(open_checkpoint(str(cached_checkpoint())))
    slots, rules = SlotTable(2, "cpu"), LogitRules(tokenizer, 50, "cpu")
    step = DecodeStep(TorchSampler(rules, slots), slots, tokenizer.special.no_speech)
    every = torch.randn(2 * 4, tokenizer.n_vocab)
    asked: list[torch.Tensor] = []

    class Decoder:
        def states(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            assert positions.tolist() == [0, 1, 2, 3] * 2
            return torch.arange(8.0)[:, None]

        def logits(self, states: torch.Tensor) -> torch.Tensor:
            asked.append(states)
            return every[states.squeeze(1).long()].clone()

    decoder: Any = Decoder()
    prompts = Prompts(
        tokens=torch.zeros(8, dtype=torch.int64),
        positions=torch.arange(4).repeat(2),
        read=torch.tensor([0, 4, 3, 7]),
    )
    sampled, no_speech = step.start(prompts, torch.tensor([0, 1]), decoder, None)
    assert [states.squeeze(1).tolist() for states in asked] == [[0, 4, 3, 7]]
    expected = every[[0, 4]].softmax(-1)[:, tokenizer.special.no_speech]
    torch.testing.assert_close(no_speech, expected)
    assert sampled.tokens.shape == (2,)
