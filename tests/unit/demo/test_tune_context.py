"""Windows for contexts of random length, and a tuning that is taken up again where it ended."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from rich.console import Console

from cluster.demo.recipe import tune_context
from cluster.demo.recipe.export import CHECKPOINT
from cluster.demo.recipe.speech.store import SpeechStore
from cluster.demo.recipe.speech.synthesis import FRAME_SAMPLES
from cluster.demo.recipe.text_tokens import TextTokens
from cluster.demo.recipe.tune_context import SLACK, Tuning, draw_shape, resume_or_start, tune
from cluster.demo.recipe.windows import WindowMaker, WindowShape
from cluster.model.encoder_context import FILE, read_context

TEXTS = ("The dog reads.", "Anna reads a book.", "Seven garden.", "The old door opens slowly.")


def make_speech(folder: Path) -> Path:
    """A shard of noise with the texts' word times: 20 steps a word."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    n_words = [len(text.split()) for text in TEXTS]
    frames = [20 * n + 4 for n in n_words]
    (folder / "sounds.json").write_text(json.dumps(["", "?", "a"]))
    samples = rng.integers(-3000, 3000, sum(frames) * FRAME_SAMPLES, dtype=np.int16)
    samples.tofile(folder / "shard-0000.i16")
    words = [(2 + 20 * i, 22 + 20 * i) for n in n_words for i in range(n)]
    np.savez(
        folder / "shard-0000.npz",
        words=np.array(words, np.int32),
        sounds=np.full(sum(frames), 2, np.int16),
    )
    columns = {"kinds": ["free"] * 4, "texts": TEXTS, "voices": ["v"] * 4, "frames": frames}
    (folder / "shard-0000.json").write_text(json.dumps(columns))
    return folder


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_speech(tmp_path_factory.mktemp("work") / "speech")


@pytest.fixture
def maker(speech: Path) -> WindowMaker:
    return WindowMaker(SpeechStore(speech), TextTokens(CHECKPOINT), "test")


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
        assert all(segment.end <= canvas.content for segment in canvas.segments)
        assert len(canvas.segments) <= (1 if lone else 99)
        # Audio is shifted by less than 10 ms against the grid.
        assert not canvas.audio[canvas.content * FRAME_SAMPLES + 160 :].any()


def test_contexts_of_every_length_are_drawn_beside_full_ones() -> None:
    rng = Random(0)
    shapes = [draw_shape(rng, 0.0) for _ in range(400)]
    trimmed = [shape.frames for shape in shapes if shape.slack == SLACK]
    full = [shape for shape in shapes if shape.slack is None]
    assert min(trimmed) < 150
    assert max(trimmed) > 1400
    assert {shape.frames for shape in full} == {1500}
    assert {shape.lone for shape in full} == {False, True}


def test_a_tuning_goes_on_where_it_ended_and_declares_its_context(
    speech: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = WindowShape(frames=120, batch=1, slack=SLACK)
    monkeypatch.setattr(tune_context, "draw_shape", lambda _rng, _done: small)
    out = speech.parent / "tuned"
    tuning = Tuning(speech.parent, CHECKPOINT, out, minutes=0.001)
    console = Console(quiet=True)
    tune(tuning, console, check_every_s=1e9)
    first = resume_or_start(tuning)
    assert first.progress.step >= 1
    longer = Tuning(speech.parent, CHECKPOINT, out, minutes=0.001 + first.progress.elapsed_s / 60)
    tune(longer, console, check_every_s=1e9)
    assert resume_or_start(tuning).progress.step > first.progress.step
    declared = read_context(out / FILE)
    assert declared is not None
    assert (declared.slack, declared.max_content_s) == (64, 30.0)


def test_a_step_changes_the_weights_and_leaves_the_positional_table(
    speech: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "speech").symlink_to(speech)
    trainer = resume_or_start(Tuning(work, CHECKPOINT, tmp_path, minutes=1))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    maker = WindowMaker(trainer.store, trainer.tokens, "step")
    losses = trainer.step(maker.batch(WindowShape(frames=120, batch=2, slack=SLACK)))
    after = trainer.model.state_dict()
    assert set(losses) == {"token", "guide"}
    assert torch.equal(
        before["model.encoder.embed_positions.weight"],
        after["model.encoder.embed_positions.weight"],
    )
    assert not torch.equal(
        before["model.encoder.conv1.weight"], after["model.encoder.conv1.weight"]
    )
