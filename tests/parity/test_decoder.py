"""Decoder logits and greedy tokens equal Hugging Face's for every shape family, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from transformers.modeling_outputs import BaseModelOutput

from cluster.common.messages import DecodeOptions
from decoder_worker.attention.base import AttentionBatch
from decoder_worker.model import TextDecoder
from tests.support.checkpoints import cached_checkpoint, make_checkpoint
from tests.support.references.hugging_face import (
    FAMILIES,
    assert_close,
    cross_kv,
    hf_model,
)
from tests.support.workers.model_runners import RunnerBench

N_TOKENS = 64


class RecordingDecoder:
    def __init__(self, model: TextDecoder) -> None:
        self._model = model
        self.given: list[Tensor] = []

    def plan(self, batch: AttentionBatch) -> None:
        self._model.plan(batch)

    def states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self._model.states(tokens, positions)

    def logits(self, states: Tensor) -> Tensor:
        logits = self._model.logits(states)
        self.given.append(logits.clone())
        return logits


def make_bench(folder: Path, n_slots: int) -> tuple[RunnerBench, RecordingDecoder]:
    bench = RunnerBench(folder, n_slots, "cpu", "float32", attention="torch")
    bench.runner._decoder = recorder = RecordingDecoder(bench.runner._decoder)
    return bench, recorder


def random_states(dims: Any, seed: int) -> Tensor:
    """What an encoder may give: [1, n_audio_ctx, n_audio_state]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, dims.n_audio_ctx, dims.n_audio_state, generator=generator)


def hf_logits(model: Any, states: Tensor, tokens: list[int]) -> Tensor:
    """The reference's logits after each of `tokens`: [len(tokens), n_vocab]."""
    output = model(encoder_outputs=(states,), decoder_input_ids=torch.tensor([tokens]))
    return output.logits[0]


def hf_choice(model: Any, options: DecodeOptions, prompt: list[int]) -> Any:
    """The reference's greedy choice under its own processors: (logits, tokens so far) -> id."""
    config = model.generation_config
    rules: list[Any] = [
        SuppressTokensLogitsProcessor(config.suppress_tokens),
        SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, len(prompt)),
    ]
    if options.timestamps:
        rules.append(WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt)))

    def choose(logits: Tensor, tokens: list[int]) -> int:
        ids, scores = torch.tensor([tokens]), logits[None]
        for rule in rules:
            scores = rule(ids, scores)
        return int(scores.argmax())

    return choose


@pytest.mark.parametrize("shape", FAMILIES)
def test_logits_and_greedy_tokens_equal_the_reference(shape: str) -> None:
    compare(shape, cached_checkpoint(shape))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "layers"), [("tiny", 4), ("base", 6), ("small", 12)])
def test_the_published_depth_equals_the_reference(tmp_path: Path, shape: str, layers: int) -> None:
    """Rounding must not grow over the layers."""
    compare(shape, make_checkpoint(tmp_path, shape, encoder_layers=1, decoder_layers=layers))


@torch.inference_mode()
def compare(shape: str, folder: Path) -> None:
    """Two sequences of unlike prompts in one batch, each against the reference alone."""
    model = hf_model(folder)
    bench, recorder = make_bench(folder, n_slots=2)
    options = [
        DecodeOptions(language="en"),
        DecodeOptions(language="en", timestamps=False, prompt_tokens=tuple(range(300, 330))),
    ]
    states = [random_states(bench.checkpoint.dims, seed) for seed in range(2)]
    sequences = [bench.sequence(slot, chosen) for slot, chosen in enumerate(options)]
    for slot, own in enumerate(states):
        bench.write(slot, cross_kv(model, own))
    no_speech = []
    for step in range(N_TOKENS):
        run = bench.runner.decode if step else bench.runner.prefill
        given = bench.runner.collect(run(sequences))
        for sequence, outputs in zip(sequences, given, strict=True):
            sequence.rows[0].tokens.append(outputs[0].token)
            if not step:
                no_speech.append(outputs[0].no_speech_prob)
    first, *others = recorder.given  # the prompts': those at SOT, then the last ones
    ours = torch.stack([first[len(sequences) :], *others])  # [step, sequence, n_vocab]
    for slot, sequence in enumerate(sequences):
        prompt = list(sequence.prompt.tokens)
        theirs = hf_logits(model, states[slot], prompt + sequence.rows[0].tokens[:-1])
        every = theirs[len(prompt) - 1 :]
        assert_close(f"{shape} logits, sequence {slot}", ours[:, slot], every)
        choose = hf_choice(model, options[slot], prompt)
        for step, token in enumerate(sequence.rows[0].tokens):
            assert choose(every[step], prompt + sequence.rows[0].tokens[:step]) == token, (
                f"step {step}"
            )
        at_sot = theirs[sequence.prompt.sot].softmax(-1)[bench.tokenizer.special.no_speech]
        assert no_speech[slot] == pytest.approx(at_sot.item(), rel=1e-3)


@pytest.mark.parametrize("shape", ["tiny", "large-v3"])
@torch.inference_mode()
def test_the_language_is_the_one_that_the_reference_detects(shape: str) -> None:
    folder = cached_checkpoint(shape)
    model = hf_model(folder)
    bench, _ = make_bench(folder, n_slots=4)
    states = [random_states(bench.checkpoint.dims, seed) for seed in range(4)]
    options = DecodeOptions(prompt_tokens=(5, 6, 7))  # no part of the detection
    sequences = [bench.sequence(slot, options) for slot in range(4)]
    for slot, own in enumerate(states):
        bench.write(slot, cross_kv(model, own))
    launched = bench.runner.detect_language(sequences)
    found = [output.token for (output,) in bench.runner.collect(launched)]
    expected = [
        model.detect_language(encoder_outputs=BaseModelOutput(own)).item() for own in states
    ]
    assert found == expected
