"""The page layout: sizes to the byte, ragged windows, a hash that tells any two apart."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from cluster.common.kv.layout import KVLayout

LARGE_V3 = KVLayout("large-v3", 32, 20, 64, 1500, 125, "bfloat16")


def test_large_v3_window_is_246_mb_in_bf16() -> None:
    assert LARGE_V3.page_shape == (32, 2, 125, 20, 64)
    assert LARGE_V3.pages_per_window == 12
    assert LARGE_V3.page_bytes * LARGE_V3.pages_per_window == 32 * 2 * 1500 * 1280 * 2


@pytest.mark.parametrize(
    ("frames", "page_frames", "pages"),
    [(1500, 64, 24), (1500, 1500, 1), (1, 64, 1), (64, 64, 1), (65, 64, 2)],
)
def test_pages_for_a_window_counts_the_partly_filled_last_one(
    frames: int, page_frames: int, pages: int
) -> None:
    assert replace(LARGE_V3, page_frames=page_frames).pages_for(frames) == pages


def test_hash_differs_when_any_field_differs() -> None:
    other = {"model": "m", "dtype": "float16", "page_frames": 50}
    changed = [
        replace(LARGE_V3, **{f.name: other.get(f.name, getattr(LARGE_V3, f.name))})
        if f.name in other
        else replace(LARGE_V3, **{f.name: getattr(LARGE_V3, f.name) + 1})
        for f in fields(LARGE_V3)
    ]
    assert len({LARGE_V3.hash, *(layout.hash for layout in changed)}) == 1 + len(changed)
    assert replace(LARGE_V3).hash == LARGE_V3.hash


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype"):
        replace(LARGE_V3, dtype="int8")
    with pytest.raises(ValueError, match="page_frames"):
        replace(LARGE_V3, page_frames=0)
    with pytest.raises(ValueError, match="page_frames"):
        replace(LARGE_V3, page_frames=1501)
