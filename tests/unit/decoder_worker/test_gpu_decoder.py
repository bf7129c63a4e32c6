"""The GPU's forward of few kernels, by their plain twins, gives what torch's layers give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.dims import EMBED_TOKENS, ModelDims
from cluster.common.model.layers import LayerNorm, as_it_is
from cluster.common.model.text.tokenizer import WhisperTokenizer
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.gpu.decoder import GpuDecoder
from decoder_worker.model import DecoderLayer, DecoderTensors, TextDecoder, TorchDecoder
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import TorchSampler
from decoder_worker.sampling.slots import SlotTable
from decoder_worker.step import DecodeStep, Prompts
from tests.support.checkpoints import cached_checkpoint
from tests.support.references.hugging_face import assert_close
from tests.support.workers.model_runners import rows_of

PAGE, FRAMES = 8, 30
SLOW = ("tiny.en", "base", "small", "medium", "large-v2", "large-v3", "large-v3-turbo", "distil")
SHAPES = ["tiny", *(pytest.param(shape, marks=pytest.mark.slow) for shape in SLOW)]


def as_on_a_gpu(decoder: TorchDecoder, tensors: DecoderTensors) -> TorchDecoder:
    """The same with products that are as they were loaded, and a residual stream in their dtype."""
    layers = range(tensors.dims.n_text_layer)
    plain = tuple(DecoderLayer.load(tensors.by_name, layer, as_it_is) for layer in layers)
    return replace(decoder, layers=plain)


def make_batch(counts: list[int], lengths: list[int]) -> AttentionBatch:
    n = len(counts)
    own = [[4 * row + page for page in range(4)] for row in range(n)]
    return AttentionBatch(
        PagedKV.make(counts, own, lengths, PAGE),
        PagedKV.make(
            counts, [[row % 3] for row in range(n)], [FRAMES - row for row in range(n)], FRAMES
        ),
    )


@torch.inference_mode()
def forward(decoder: TextDecoder, batch: AttentionBatch) -> Tensor:
    decoder.plan(batch)
    return decoder.states(*rows_of(batch, PAGE))


def make_pools(dims: ModelDims) -> tuple[Tensor, Tensor]:
    """Of random numbers: for 19 rows of up to four pages, and of three windows."""
    shape, heads = (dims.n_text_layer, 2), (dims.n_text_head, dims.text_head_dim)
    generator = torch.Generator().manual_seed(5)
    own = torch.randn(76, *shape, PAGE, *heads, generator=generator)
    return own, torch.randn(3, *shape, FRAMES, *heads, generator=generator)


STEPS = make_batch([1] * 5, [1, 9, 30, 8, 17])
MANY_STEPS = make_batch([1] * 18, [1 + row for row in range(18)])
PROMPTS = make_batch([3, 1, 20], [3, 19, 29])


@pytest.mark.timeout(600)  # minutes on a busy machine
@pytest.mark.parametrize("shape", SHAPES)
def test_the_layers_equal_torch_at_every_published_size(shape: str) -> None:
    checkpoint = open_checkpoint(str(cached_checkpoint(shape)))
    tensors = DecoderTensors.load(checkpoint, torch.float32, "cpu")
    own, cross = make_pools(checkpoint.dims)
    expected_own = own.clone()
    reference = TorchDecoder.of(tensors, TorchAttention(expected_own, cross))
    made = GpuDecoder(as_on_a_gpu(reference, tensors), TorchAttention(own, cross))
    for batch in (STEPS, MANY_STEPS, PROMPTS):
        assert_close("states", forward(made, batch), forward(reference, batch), share=2e-5)
        assert_close("pages", own, expected_own, share=2e-5)


def test_the_layers_round_as_torch_does_in_bfloat16() -> None:
    """Nearer to float32 than twice what torch's layers in bfloat16 are."""
    checkpoint = open_checkpoint(str(cached_checkpoint("tiny")))
    own, cross = make_pools(checkpoint.dims)
    errors = []
    for batch in (STEPS, MANY_STEPS):
        states = {}
        for dtype in (torch.float32, torch.bfloat16):
            tensors = DecoderTensors.load(checkpoint, dtype, "cpu")
            pools = [(own.to(dtype, copy=True), cross.to(dtype)) for _ in range(2)]
            attention = TorchAttention(*pools[0])
            decoder = as_on_a_gpu(TorchDecoder.of(tensors, attention), tensors)
            states[dtype] = forward(decoder, batch)
        made = forward(GpuDecoder(decoder, TorchAttention(*pools[1])), batch)
        exact = states[torch.float32]
        errors.append([(x - exact).norm() / exact.norm() for x in (made, states[torch.bfloat16])])
    for ours, plain in errors:
        assert ours < 2 * plain < 0.05, errors


def test_float16_stays_finite_where_the_stream_times_a_gain_does_not() -> None:
    """One channel of the stream is 4,000, as in trained models, and its norm's gain is 32."""
    checkpoint = open_checkpoint(str(cached_checkpoint("tiny")))
    tensors = DecoderTensors.load(checkpoint, torch.float32, "cpu")
    tensors.by_name["decoder.embed_positions.weight"][:, 7] = 4000.0
    tensors.by_name["decoder.layers.0.self_attn_layer_norm.weight"][7] = 32.0
    own, cross = (torch.zeros_like(pool) for pool in make_pools(checkpoint.dims))
    packed = TorchDecoder.of(tensors, TorchAttention(own, cross))
    found = {}
    for dtype in (torch.float32, torch.float16):
        cast = {name: tensor.to(dtype) for name, tensor in tensors.by_name.items()}
        reference = replace(
            as_on_a_gpu(packed, replace(tensors, by_name=cast)),
            embed_tokens=cast[EMBED_TOKENS],
            embed_positions=cast["decoder.embed_positions.weight"],
            norm=LayerNorm.load(cast, "decoder.layer_norm"),
        )
        attention = TorchAttention(own.to(dtype), cross.to(dtype))
        found[dtype] = forward(GpuDecoder(reference, attention), STEPS).float()
    assert_close("states", found[torch.float16], found[torch.float32], share=0.02)


# ---- From states to logits: float32 sums, never rounded to the weights' 16 bits, in one pass.


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


def test_a_prompt_reads_the_heads_weights_once() -> None:
    """The start of transcript, for its probability of no speech, and the last token together."""
    tokenizer = WhisperTokenizer.from_checkpoint(open_checkpoint(str(cached_checkpoint())))
    slots, rules = SlotTable(2, "cpu"), LogitRules(tokenizer, 50, "cpu")
    step = DecodeStep(TorchSampler(rules, slots), slots, tokenizer.special.no_speech)
    every = torch.randn(2 * 4, tokenizer.n_vocab)
    decoder = Mock()
    decoder.states.return_value = torch.arange(8)
    decoder.logits.side_effect = lambda states: every[states]
    zeros = torch.zeros(8, dtype=torch.int64)
    prompts = Prompts(tokens=zeros, positions=zeros, read=torch.tensor([0, 4, 3, 7]))
    sampled, no_speech = step.start(prompts, torch.tensor([0, 1]), decoder, None)
    ((read,),) = (call.args for call in decoder.logits.call_args_list)
    assert read.tolist() == [0, 4, 3, 7]
    expected = every[[0, 4]].softmax(-1)[:, tokenizer.special.no_speech]
    torch.testing.assert_close(no_speech, expected)
    assert sampled.tokens.shape == (2,)
