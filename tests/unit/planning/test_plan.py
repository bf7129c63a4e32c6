"""A plan keeps its objective, says what it needs, and is refused where nothing would do."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from cluster.cli.operate.files import read_cluster_file, read_serve_file
from cluster.cli.planning import cluster_file, write_plan
from cluster.common.errors import ConfigurationError
from cluster.planning.design import (
    Design,
    Found,
    NodeKind,
    Order,
    make_load,
    parse_kinds,
    parse_link,
    parse_objectives,
    parse_rate,
)
from cluster.planning.plan import Plan, make_plan
from cluster.planning.scenario import Lengths, Load, arrivals
from tests.unit.planning.test_simulation import ENCODE_S, make_profile

CLIPS = Lengths(median_s=5.0, sigma=0.0)


def make_order(rate: float = 15.0, limit_s: float = 1.0, **changes: Any) -> Order:
    kind = NodeKind("test", 1.0, make_profile())
    load = Load(rate_per_s=rate, lengths=CLIPS)
    fields: dict[str, Any] = {
        "load": load,
        "objectives": {95.0: limit_s},
        "kinds": (kind,),
        "link_gbit_per_s": 100.0,
        "trial_requests": 300,
        "check_s": 15.0,
    }
    return Order(**fields | changes)


def planned(order: Order) -> Plan:
    return make_plan(order, lambda _: None)


@pytest.fixture(scope="module")
def split() -> Plan:
    return planned(make_order(placements=("split",)))


@pytest.mark.parametrize(
    ("text", "per_s"), [("500/s", 500.0), ("0.5", 0.5), ("30000/min", 500.0), ("7200 / h", 2.0)]
)
def test_a_rate_has_its_unit(text: str, per_s: float) -> None:
    assert parse_rate(text) == pytest.approx(per_s)


def test_objectives_and_links_are_read() -> None:
    assert parse_objectives("p50 < 400 ms, p99.9<2 s") == {50: 0.4, 99.9: 2.0}
    assert parse_link("400gbps") == parse_link("50GB/s") == 400.0


@pytest.mark.parametrize(
    ("call", "text", "said"),
    [
        (parse_rate, "many", "500/s"),
        (parse_rate, "0/s", "500/s"),
        (parse_objectives, "95 < 1", "p95 < 1 s"),
        (parse_objectives, "p100 < 1 s", "p95 < 1 s"),
        (parse_link, "fast", "400gbps"),
    ],
)
def test_a_text_that_is_none_tells_what_would_be_one(call: Any, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        call(text)


def test_devices_are_found_by_model_and_only_together_where_they_fit() -> None:
    first, second = parse_kinds("h200:1.9,l40s:0.6", "large-v3")
    assert (first.profile.name, second.dollars) == ("large-v3-h200", 0.6)
    with pytest.raises(ConfigurationError, match="cannot work together"):
        parse_kinds("h200,two-cores", "large-v3")
    with pytest.raises(ConfigurationError, match="splitscribe profile"):
        parse_kinds("tpu:1", "large-v3")
    with pytest.raises(ConfigurationError, match="DOLLARS_PER_HOUR"):
        parse_kinds("h200:cheap", "large-v3")


def test_a_plan_keeps_its_objective_with_what_can_be_computed_and_when_nodes_are_lost(
    split: Plan,
) -> None:
    """15 requests a second of 0.1 s each fill one and a half encoders."""
    best = split.best
    assert (best.cells, best.encoders, best.decoders) == (1, 2, 1)
    least = Found.least(best.order, best.design)
    assert least.costs.encode_s == pytest.approx(ENCODE_S)
    assert least.encoders == 2
    assert split.check.is_kept
    assert split.loss is not None
    assert split.check.figures["failed"] == split.loss.figures["failed"] == 0
    assert split.loss.figures["decisions"] == ["encoder-0 is killed", "decoder-0 is killed"]
    assert split.check.figures["p50_s"] >= split.floor.figures["p50_s"]


def test_the_figures_say_what_saturates_next(split: Plan) -> None:
    figures = split.figures()
    first, at = next(iter(figures["saturates_at_rate_per_s"].items()))
    assert first == "encoders"
    assert at == pytest.approx(2 / ENCODE_S, rel=0.01)
    assert figures["encoders"] == {"device": "test", "needed": 2, "spare": 1}
    assert figures["cost"]["dollars_per_hour"] == 5.0, "two and one, and a spare of each"
    assert figures["profile"]["predicted"]
    json.dumps(figures)


def test_the_files_of_a_plan_pass_the_checks_of_who_starts_them(
    split: Plan, tmp_path: Path
) -> None:
    write_plan(split, split.figures(), tmp_path / "plan")
    serve = read_serve_file(tmp_path / "plan/serve.yaml")
    assert serve.settings.encoder.replicas == 3
    assert serve.settings.decoder.replicas == 2
    assert serve.settings.encoder.node_labels == {"pool": "encoder"}
    cluster = read_cluster_file(tmp_path / "plan/cluster.yaml")
    assert len(cluster.worker_addresses) == 5
    starts = yaml.safe_load((tmp_path / "plan/cluster.yaml").read_text())
    table = starts["worker_start_ray_commands"][1]
    assert table.count("pool=encoder") == table.count("pool=decoder") == 1
    assert '*" 10.0.0.13 "*) pool=encoder' in table


def test_hosts_with_gpus_install_what_those_need() -> None:
    (kind,) = parse_kinds("l40s:0.6", "large-v3")
    order = make_order(kinds=(kind,))
    text = cluster_file(Found.least(order, Design("split", kind, kind)).nodes(), 1)
    gpu_line = next(line for line in text.splitlines() if "flashinfer" in line)
    assert gpu_line.startswith("  - "), "a comment no more"


def test_colocated_workers_are_cells_of_one(tmp_path: Path) -> None:
    plan = planned(make_order(placements=("colocated",)))
    assert plan.best.workers == plan.best.cells >= 2
    write_plan(plan, plan.figures(), tmp_path / "plan")
    serve = read_serve_file(tmp_path / "plan/serve.yaml")
    assert serve.settings.placement == "colocated"
    assert serve.settings.encoder.replicas == 1
    assert len(read_cluster_file(tmp_path / "plan/cluster.yaml").worker_addresses) == 1


def test_what_nobody_can_keep_is_refused_with_the_floor() -> None:
    with pytest.raises(ConfigurationError, match=r"alone takes p95 0\.\d+ s"):
        planned(make_order(limit_s=0.05))


def test_too_small_a_cluster_is_said_to_be_too_small() -> None:
    with pytest.raises(ConfigurationError, match="--max-workers"):
        planned(make_order(rate=60.0, most_workers=3))


def test_a_trace_has_its_own_rate_and_a_cell_its_share_of_it(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    times = [float(n) for n in range(100)] + [50.0 + n / 10 for n in range(200)]
    file.write_text("\n".join(json.dumps({"at_s": t, "audio_s": 5.0}) for t in times))
    load = make_load(None, "short", file)
    assert load.rate_per_s == pytest.approx(300 / 99)
    assert len(list(arrivals(load, Random(0)))) == 300
    share = load.model_copy(update={"share": 0.5})
    assert len(list(arrivals(share, Random(0)))) == pytest.approx(150, rel=0.2)
    plan = planned(make_order(load=load, placements=("split",), spare_nodes=0))
    assert plan.best.encoders >= 2, "ten a second come for some time, and as many more"
    with pytest.raises(ConfigurationError, match="not both"):
        make_load("5/s", "short", file)
