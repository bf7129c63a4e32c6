"""A plan keeps its objective, says what it needs, and is refused where nothing would do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli.operate.files import read_serve_file
from cluster.cli.planning import plan as plan_command
from cluster.common.cores import MOST_AUDIO_WORKERS
from cluster.common.errors import ConfigurationError
from cluster.planning import plan as planning
from cluster.planning.design import Design, NodeKind, Order, parse_kinds
from cluster.planning.plan import Plan, Trial, make_plan
from cluster.planning.scenario import NAMED_LENGTHS, Lengths, Load
from tests.unit.planning.test_simulation import ENCODE_S, make_profile

CLIPS = Lengths(median_s=5.0, sigma=0.0)


def make_order(rate: float = 15.0, limit_s: float = 1.0, **changes: Any) -> Order:
    kind = NodeKind("test", 1.0, make_profile())
    load = Load(rate_per_s=rate, seconds=15.0, lengths=CLIPS)
    fields: dict[str, Any] = {
        "load": load,
        "slo_s": limit_s,
        "kinds": (kind,),
        "link_gbit_per_s": 100.0,
    }
    return Order(**fields | changes)


@pytest.fixture(autouse=True, scope="module")
def _short_trials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "REQUESTS", 300)
        yield


def planned(order: Order) -> Plan:
    return make_plan(order, lambda _: None)


@pytest.fixture(scope="module")
def split() -> Plan:
    return planned(make_order(placements=("split",)))


def test_devices_are_found_by_model_and_only_together_where_they_fit() -> None:
    first, second = parse_kinds("h200:1.9,l40s:0.6", "large-v3")
    assert (first.profile.name, second.price) == ("large-v3-h200", 0.6)
    with pytest.raises(ConfigurationError, match="cannot work together"):
        parse_kinds("h200,two-cores", "large-v3")
    with pytest.raises(ConfigurationError, match="splitscribe profile"):
        parse_kinds("tpu:1", "large-v3")
    for price in ("cheap", "nan", "-1", "inf"):
        with pytest.raises(ConfigurationError, match="DOLLARS_PER_HOUR"):
            parse_kinds(f"h200:{price}", "large-v3")
    assert parse_kinds("h200", "large-v3")[0].price == 1.0, "devices are counted"
    with pytest.raises(ConfigurationError, match=r"for all of h200:1\.9,l40s, or"):
        parse_kinds("h200:1.9,l40s", "large-v3")


def test_uploads_are_decoded_by_as_many_routers_as_have_the_processes() -> None:
    order = make_order(load=Load(rate_per_s=200.0, lengths=NAMED_LENGTHS["long"]))
    (kind,) = order.kinds
    least = Design.least(order, "split", kind, kind)
    assert least.router().audio_workers <= MOST_AUDIO_WORKERS
    assert least.saturates_at()["audio workers"] > order.load.rate_per_s


@pytest.mark.parametrize("asked", [{"rate": math.inf}, {"rate": 1.0, "seconds": math.inf}])
def test_a_load_that_never_ends_is_refused(asked: Any) -> None:
    with pytest.raises(ConfigurationError, match="finite"):
        plan_command(gpus="two-cores", **asked)


def test_a_plan_keeps_its_objective_with_what_can_be_computed(split: Plan) -> None:
    """15 requests a second of 0.1 s each fill one and a half encoders."""
    best = split.best
    assert (best.cells, best.encoders, best.decoders) == (1, 2, 1)
    least = Design.least(best.order, best.placement, best.encoder, best.decoder)
    assert least.costs.encode_s == pytest.approx(ENCODE_S)
    assert least.encoders == 2
    assert split.check.is_kept
    assert split.check.figures["failed"] == 0


def test_a_design_that_its_check_makes_dearer_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three colocated workers keep the objective in short simulations, and six in long ones."""

    def try_out(design: Design, _seconds: float, seed: int) -> Trial:
        colocated = 6 if seed == planning.CHECK_SEED else 3
        is_kept = design.workers >= (4 if design.is_split else colocated)
        return Trial(is_kept, "made up", {"encoder_busy": 0.5, "decoder_busy": 0.5})

    monkeypatch.setattr(planning, "try_out", try_out)
    found = planned(make_order(spare_nodes=0))
    assert (found.best.placement, found.best.price) == ("split", 4.0)
    assert [one.price for one in found.kept] == [4.0, 6.0]
    assert found.figures()["splitting"] == "pays"


def test_the_figures_say_what_saturates_next(split: Plan) -> None:
    figures = split.figures()
    first, at = next(iter(figures["saturates_at_rate_per_s"].items()))
    assert first == "encoders"
    assert at == pytest.approx(2 / ENCODE_S, rel=0.01)
    told = {"pool": "encoder", "kind": "test", "workers": 2, "nodes": 3, "spare": 1}
    assert figures["nodes"][0] == told | {"devices": 1, "price": 3.0}
    assert figures["price_of_an_hour"] == 5.0, "two and one, and a spare of each"
    assert figures["profile"]["predicted"]


@pytest.mark.parametrize("placement", ["split", "colocated"])
def test_a_plan_prints_the_file_that_deploys_it(
    placement: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    plan_command(5.0, gpus="two-cores", placement=placement, seconds=20.0)
    file.write_text(capsys.readouterr().out)
    serve, (first, *lines) = read_serve_file(file).settings, file.read_text().splitlines()
    comments = "\n".join(line[2:] for line in lines if line.startswith("#"))
    found = yaml.safe_load(comments.partition("\nFor ")[0])
    assert serve.placement == placement
    assert first.startswith("# profile two-cores (measured)")
    if placement == "split":
        assert serve.encoder.replicas == found["nodes"][0]["workers"] + 1
        assert serve.encoder.node_labels == {"pool": "encoder"}
    else:
        assert serve.encoder.replicas == 1
        assert serve.decoder.node_labels == {"pool": "worker"}


def test_what_nobody_can_keep_is_refused_with_the_best_that_was_tried() -> None:
    with pytest.raises(ConfigurationError, match=r"p95 0\.\d+ s"):
        planned(make_order(limit_s=0.05, placements=("split",)))


def test_too_small_a_cluster_is_said_to_be_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MOST_WORKERS", 3)
    with pytest.raises(ConfigurationError, match="at most 3 workers"):
        planned(make_order(rate=60.0))
