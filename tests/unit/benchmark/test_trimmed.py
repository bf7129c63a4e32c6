"""The benchmark of trimmed windows: its ceiling, and a small run of it and of its neighbours."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from benchmark.cpu import trimmed
from benchmark.serving import reuse_http
from benchmark.shared.flops import FRAMES
from benchmark.shared.shapes import SHAPES
from benchmark.transfer import first_read


def test_a_window_of_all_positions_has_all_operations_and_attention_counts_twice() -> None:
    base = SHAPES["base"]
    assert trimmed.times_fewer_operations(base, FRAMES) == 1.0
    assert FRAMES / 320 < trimmed.times_fewer_operations(base, 320) < (FRAMES / 320) ** 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("main", "flags", "expected"),
    [
        (trimmed.main, ("--shape", "tiny", "--rounds", "2"), "times_fewer_operations"),
        (first_read.main, ("--shape", "tiny", "--rounds", "2"), "pools"),
        (reuse_http.main, ("--shape", "tiny", "--rounds", "1", "--files", "2"), "miss_over_hit"),
    ],
)
def test_a_small_run_prints_its_figures(
    main: Callable[[], None],
    flags: tuple[str, ...],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(main), *flags])
    main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])[expected]
