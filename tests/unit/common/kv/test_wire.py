"""Neighbouring pages coalesce into one descriptor, and every page still comes to its place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.common.kv.wire import Descriptor, descriptors


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20))
def test_descriptors_move_every_page_to_its_place(pairs: list[tuple[int, int]]) -> None:
    pages = dict(sorted(pairs))  # in order, so that some are neighbours on both sides
    local, remote = list(pages), list(pages.values())
    assert descriptors([0, 100, 200], [500, 600, 900], 100) == [
        Descriptor(0, 500, 200),
        Descriptor(200, 900, 100),
    ], "neighbours on both sides become one"
    moved = {}
    for desc in descriptors([p * 8 for p in local], [p * 8 for p in remote], 8):
        assert desc.n_bytes % 8 == 0
        for offset in range(0, desc.n_bytes, 8):
            moved[desc.local + offset] = desc.remote + offset
    assert moved == {here * 8: there * 8 for here, there in zip(local, remote, strict=True)}
