"""At fixed sizes nothing is computed eagerly but what no bucket holds, and nothing waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from decoder_worker.gpu.graphs import bucket_sizes, few_sizes
from decoder_worker.scheduling.sequence import DecodeSequence
from decoder_worker.step import Launched
from tests.support.checkpoints import cached_checkpoint
from tests.support.workers.decoder_engines import ANSWER_S, make_stand, wait_until


def test_more_candidates_than_any_bucket_has_run_all_the_same() -> None:
    options: dict[str, Any] = {"seed": 1, "temperatures": (0.8,), "best_of": 9}
    found = []
    for bucketed in (False, True):
        with make_stand(cached_checkpoint(), max_batch=9, bucketed=bucketed) as stand:
            found.append(stand.decode(**options))
            stand.assert_all_returned()
    assert found[0].tokens == found[1].tokens


def test_the_language_of_one_makes_no_other_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step of those that run is launched before the language's forward is waited for."""
    with make_stand(cached_checkpoint(), steps_ahead=1, bucketed=True) as stand:
        runner = stand.engine._loop._runner
        events: list[tuple[str, int]] = []
        launches: dict[int, int] = {}

        def noting(name: str, launch: Any) -> Any:
            def called(sequences: list[DecodeSequence]) -> Launched:
                result: Launched = launch(sequences)
                launches[id(result)] = len(events)
                events.append((name, len(events)))
                return result

            return called

        def collect(launched: Launched, collect: Any = runner.collect) -> Any:
            events.append(("collect", launches[id(launched)]))
            return collect(launched)

        for name in ("detect_language", "prefill", "decode"):
            monkeypatch.setattr(runner, name, noting(name, getattr(runner, name)))
        monkeypatch.setattr(runner, "collect", collect)
        running = stand.engine.submit(stand.request(0, max_new_tokens=200))
        wait_until(lambda: any(name == "decode" for name, _ in tuple(events)), "not decoding")
        unknown = stand.engine.submit(stand.request(1, language=None))
        assert unknown.result(ANSWER_S).language
        assert running.result(ANSWER_S).tokens
        stand.assert_all_returned()
    asked = next(i for i, (name, _) in enumerate(events) if name == "detect_language")
    told = events.index(("collect", asked))
    between = [name for name, _ in events[asked + 1 : told]]
    assert "decode" in between


def test_sizes_of_buckets() -> None:
    assert bucket_sizes(64) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    assert bucket_sizes(7) == [1, 2, 4, 7]
    assert few_sizes(16, 4) == [1, 4, 16]
    assert few_sizes(12, 4) == [1, 4, 12]
    assert few_sizes(1, 2) == [1]
