"""The evaluation of a demo checkpoint goes on where it was stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from cluster.demo.recipe import evaluate
from cluster.demo.recipe.examples import Example
from cluster.demo.recipe.export import CHECKPOINT
from cluster.demo.recipe.scores import Score

ROW = {"windows": 2.0, "wer_served": 1.5}


def test_rows_are_kept_and_those_of_another_checkpoint_refused(tmp_path: Path) -> None:
    state, other = tmp_path / "state.json", tmp_path / "other"
    measured = {"checkpoint": evaluate.digest_of(CHECKPOINT), "scale": 1.0}
    kept = evaluate.KeptRows(state, measured)
    kept.add("made", ROW)
    kept.add("free", ROW)
    assert evaluate.KeptRows(state, measured).by_set == {"made": ROW, "free": ROW}
    assert not list(tmp_path.glob("*.part"))
    shutil.copytree(CHECKPOINT, other)
    assert evaluate.digest_of(other) == measured["checkpoint"], "wherever it lies"
    (other / "encoder_context.json").write_text(json.dumps({"slack": 0, "max_content_s": 30.0}))
    with pytest.raises(SystemExit, match="name another file"):
        evaluate.KeptRows(state, {**measured, "checkpoint": evaluate.digest_of(other)})


def test_sets_that_are_done_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the second of three sets: the next run takes that and the third."""
    sets: evaluate.Sets = {name: [] for name in ("first", "second", "third")}
    served: list[str] = []
    stops = True

    def serve(_: Path, asked: dict[str, list[Example]], __: object) -> dict[str, Score]:
        (name,) = asked
        if stops and name == "second":
            raise KeyboardInterrupt
        served.append(name)
        return {name: Score()}

    monkeypatch.setattr(evaluate, "make_sets", lambda scale: sets)
    monkeypatch.setattr(evaluate, "LoneModel", lambda _: None)
    monkeypatch.setattr(evaluate, "score", lambda *_: Score())
    monkeypatch.setattr(evaluate, "score_served", serve)
    state, console = tmp_path / "state.json", Console(quiet=True)
    with pytest.raises(KeyboardInterrupt):
        evaluate.evaluate(CHECKPOINT, 1.0, console, state)
    stops = False
    assert list(evaluate.evaluate(CHECKPOINT, 1.0, console, state)) == list(sets)
    assert served == ["first", "second", "third"]
