"""`benchmark.planning.cells`: what is drawn is like the cell that it is drawn from."""

from __future__ import annotations

import numpy as np
import pytest

from benchmark.planning.cells import Cell, row_of


def make_cell() -> Cell:
    """Ten seconds of 500 requests each; in the sixth they are slow, and one in ten fails."""
    quick, slow = np.linspace(0.1, 0.2, 500), np.linspace(2.0, 3.0, 500)
    slow[::10] = np.inf
    return Cell([slow if second == 5 else quick for second in range(10)])


def test_drawn_cells_have_the_latencies_and_failures_of_the_same_second() -> None:
    cell, chance = make_cell(), np.random.default_rng(0)
    cells = [cell, *(cell.drawn(chance) for _ in range(19))]
    alone, row = row_of([cell], 500.0), row_of(cells, 500.0)
    assert row["cells"] == 20
    assert row["rate_per_s"] == 10_000
    assert row["requests"] == pytest.approx(20 * alone["requests"], rel=0.02)
    assert row["failed"] == pytest.approx(20 * alone["failed"], rel=0.2)
    assert row["p50_s"] == pytest.approx(alone["p50_s"], rel=0.02)
    assert row["disturbed_s"] == alone["disturbed_s"] == 1
    assert all((second >= 2.0).all() == (n == 5) for n, second in enumerate(cells[7].blocks))


def test_cells_differ_by_chance_in_what_comes() -> None:
    cell, chance = make_cell(), np.random.default_rng(0)
    counts = [len(cell.drawn(chance).blocks[0]) for _ in range(200)]
    assert np.mean(counts) == pytest.approx(500, rel=0.02)
    assert np.var(counts) == pytest.approx(500, rel=0.3)  # as of a Poisson process
