"""The recipe: windows for contexts of random length, and a training taken up again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmark.shared.speech.synthesis import FRAME_SAMPLES
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.demo.recipe.store import SpeechStore
from cluster.demo.recipe.train import (
    CHECKPOINT,
    CONTEXT,
    FROM_NOTHING,
    SLACK,
    Stage,
    Trainer,
    encode,
)
from cluster.demo.recipe.windows import WindowMaker, WindowShape

TEXTS = ("The dog reads.", "Anna reads a book.", "Seven garden.", "The old door opens slowly.")
SMALL = WindowShape(frames=120, batch=2, slack=SLACK)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of noise with the texts' word times: 20 steps a word."""
    folder = tmp_path_factory.mktemp("work") / "speech"
    folder.mkdir()
    rng = np.random.default_rng(0)
    n_words = [len(text.split()) for text in TEXTS]
    frames = [20 * n + 4 for n in n_words]
    samples = rng.integers(-3000, 3000, sum(frames) * FRAME_SAMPLES, dtype=np.int16)
    samples.tofile(folder / "shard-0000.i16")
    words = [(2 + 20 * i, 22 + 20 * i) for n in n_words for i in range(n)]
    np.savez(
        folder / "shard-0000.npz",
        texts=TEXTS,
        frames=frames,
        words=np.array(words, np.int32),
        sounds=["a"],
        codes=np.zeros(sum(frames), np.int64),
    )
    return folder


@pytest.fixture
def maker(speech: Path) -> WindowMaker:
    tokenizer = WhisperTokenizer.from_checkpoint(open_checkpoint(str(CHECKPOINT), weights=False))
    return WindowMaker(SpeechStore(speech), tokenizer, "test")


@pytest.mark.parametrize("lone", [False, True])
def test_a_trimmed_window_begins_the_frame_and_ends_in_digital_silence(
    maker: WindowMaker, lone: bool
) -> None:
    shape = WindowShape(frames=200, batch=1, lone=lone, slack=60)
    for _ in range(50):
        canvas = maker.fill(shape)
        maker.add_noise(canvas)
        assert 140 <= canvas.content <= 200
        assert maker.offset(shape) == 0
        assert all(placed.end <= canvas.content for placed in canvas.placed)
        assert len(canvas.placed) <= (1 if lone else 99)
        # Audio is shifted by less than 10 ms against the grid.
        assert not canvas.audio[canvas.content * FRAME_SAMPLES + 160 :].any()


def test_a_training_goes_on_where_it_ended_and_leaves_a_checkpoint_of_the_same_kind(
    speech: Path, tmp_path: Path
) -> None:
    stage = replace(CONTEXT, draw=lambda _rng, _done: SMALL, steps=3)
    console, work = Console(quiet=True), tmp_path / "new" / "work"
    Trainer(work, speech, replace(stage, steps=2), CHECKPOINT).run(console)
    longer = Trainer(work, speech, stage, CHECKPOINT)
    assert longer.step_number == 2
    longer.run(console)
    state = Trainer(work, speech, stage, CHECKPOINT).average.state_dict()
    for name, value in longer.average.state_dict().items():
        assert torch.equal(value, state[name]), name
    ours, theirs = open_checkpoint(str(work / "checkpoint")), open_checkpoint(str(CHECKPOINT))
    assert ours.dims == theirs.dims
    for name in ("tokenizer.json", "generation_config.json", "preprocessor_config.json"):
        assert (work / "checkpoint" / name).read_text() == (CHECKPOINT / name).read_text()


@pytest.mark.parametrize("stage", [FROM_NOTHING, CONTEXT])
def test_a_step_changes_the_weights_and_leaves_the_positional_table(
    speech: Path, tmp_path: Path, stage: Stage
) -> None:
    trainer = Trainer(tmp_path, speech, stage, CHECKPOINT)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    maker = WindowMaker(trainer.store, trainer.tokenizer, "step")
    losses = trainer.step(maker.batch(SMALL))
    after = trainer.model.state_dict()
    assert set(losses) == set(stage.losses)
    fixed = "model.encoder.embed_positions.weight"
    assert torch.equal(before[fixed], after[fixed])
    for name in before:
        if name not in (fixed, "model.decoder.embed_positions.weight") and "bias" not in name:
            assert not torch.equal(before[name], after[name]), name


def test_the_whole_frame_is_encoded_as_transformers_does(maker: WindowMaker, speech: Path) -> None:
    trainer = Trainer(speech.parent, speech, CONTEXT, CHECKPOINT)
    batch = maker.batch(WindowShape(frames=1500, batch=1))
    with torch.inference_mode():
        ours = encode(trainer.model.model.encoder, batch)
        theirs = trainer.model.model.encoder(batch.mel).last_hidden_state
    torch.testing.assert_close(ours, theirs)
