"""The kernels that a GPU would be given, counted: a change that adds one is seen here."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmark.gpu.launches import Work, count
from benchmark.gpu.meta_models import decode_step, encode
from benchmark.gpu.predictions import predict_live, predict_step
from benchmark.gpu.roofline import H200, LAUNCH_S

OUTSIDE = 10  # of a step: embedding, lengths, head, rules, sampling and slots


def layer_of(n_rows: int, *, fused: bool) -> Counter[str]:
    """Kernels of one layer: what 28 more layers launch, by name."""
    works = [
        count(decode_step(model, n_rows, fused=fused), context=1500, self_context=64)
        for model in ("large-v3-turbo", "large-v3")
    ]
    few, many = (work.kernels for work in works)
    layers = (many - few).total() // 28
    assert not fused or few.total() - 4 * layers == OUTSIDE
    each = {name: divmod(many[name] - few[name], 28) for name in many}
    assert not any(rest for _, rest in each.values())
    return Counter({name: n for name, (n, _) in each.items() if n})


def test_few_rows_take_nine_kernels_a_layer() -> None:
    """And two that merge attention, whose rows alone do not occupy a GPU."""
    assert layer_of(8, fused=True) == {"few_rows": 6, "append_qkv": 1, "attention": 4}


def test_more_rows_take_twelve() -> None:
    """Three of the products are split up by the library below 65 rows; above GELU is its own."""
    found = layer_of(64, fused=True)
    split = {"mm": 3, "linear": 1}  # of the outputs' width
    assert found - Counter(split) == {
        "add_norm": 3,
        "mm": 4,
        "linear": 1,
        "few_rows": 1,
        "append_qkv": 1,
        "attention": 2,
    }
    assert layer_of(96, fused=True) == {
        "add_norm": 3,
        "mm": 4,
        "linear": 2,
        "gelu": 1,
        "append_qkv": 1,
        "attention": 2,
    }


def test_torch_layers_take_sixteen() -> None:
    found = layer_of(96, fused=False)
    assert sum(found.values()) == 16
    assert found["add"] == found["layer_norm"] == 3


def test_a_step_reads_its_weights_and_its_kv_and_little_else() -> None:
    for n_rows in (1, 64):
        found = predict_step("large-v3", n_rows, 1500, H200, LAUNCH_S)
        floor_bytes = found.floor_s * H200.bytes_per_s
        assert floor_bytes < found.after.n_bytes < 1.15 * floor_bytes + 0.01e9
        assert found.after.n_bytes < found.before.n_bytes + 0.02e9
        assert found.after.n_kernels < found.before.n_kernels
        assert found.floor_s < found.after_s < found.before_s


def test_live_sessions_are_as_many_as_updates_fit_into_a_second() -> None:
    padded, trimmed = (predict_live("large-v3", n, H200, LAUNCH_S) for n in (1500, 320))
    for one in (padded, trimmed):
        update_s = (one["encoder_ms"] + one["decoder_ms"]) / 1000
        assert one["by_turns"] == pytest.approx(1 / update_s)
        assert one["by_turns"] < one["overlapped"] < 2 * one["by_turns"]
        assert one["float8_by_turns"] > one["by_turns"]
    assert trimmed["by_turns"] > 3 * padded["by_turns"]


def test_a_launch_costs_its_time_and_the_slower_of_its_two() -> None:
    work = Work()
    work.add("one", 2, n_bytes=4.3e12)
    assert work.n_kernels == 2
    assert len(work.launches) == 2
    assert work.n_bytes == pytest.approx(4.3e12)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("torch", {"layer_norm": 2, "linear": 4, "attention": 1, "gelu": 1, "add": 2}),
        ("fused", {"add_norm": 2, "linear": 2, "mm": 2, "attention": 1, "gelu": 1}),
        ("float8", {"add_norm": 2, "scaled_product": 4, "attention": 1, "scale_rows": 2}),
    ],
)
def test_the_kernels_of_an_encoder_layer(layers: str, expected: dict[str, int]) -> None:
    """Nothing else, so nothing copies: of tiny's four layers and of base's six."""
    tiny, base = (count(encode(model, 2, layers)).kernels for model in ("tiny", "base"))
    assert {name: (base[name] - tiny[name]) / 2 for name in base if base[name] > tiny[name]} == (
        expected
    )
