"""What is counted of a demo checkpoint, and of what speech."""

from __future__ import annotations

import numpy as np
import pytest

from benchmark.accuracy.demo_model import measured
from benchmark.shared.speech import corpus, synthesis
from benchmark.shared.speech.examples import Example, ExampleMaker
from benchmark.shared.speech.synthesis import SynthesisError
from router.transcript import Transcript
from tests.support.router_fakes import make_segment


def test_errors_and_segment_times_are_counted_over_a_set() -> None:
    said = Example(np.zeros(16_000, np.float32), [(0.0, 1.0, "Anna reads."), (1.5, 2.0, "No.")])
    silent = Example(np.zeros(16_000, np.float32), [])
    segments = (make_segment(0, " Anna reads.", 0.1), make_segment(1, " Now.", 1.8))
    heard = Transcript("transcribe", "en", 3.0, "Anna reads. Now.", segments)
    nothing = Transcript("transcribe", "en", 1.0, "", ())
    found = measured([said, silent], [heard, nothing])
    assert (found["words"], found["wer"]) == (3, 33.33)
    assert (found["answered"], found["matched"]) == (1, 1)
    assert (found["median_start_gap_s"], found["median_end_gap_s"]) == (0.2, 0.95)


def test_without_the_speech_libraries_nothing_waits_for_a_voice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> None:
        raise SynthesisError("it is missing")

    for library in ("_espeak", "_flite"):
        monkeypatch.setattr(synthesis, library, missing)
    with pytest.raises(SynthesisError, match="missing"):
        ExampleMaker("test").alone(corpus.made_sentence)
