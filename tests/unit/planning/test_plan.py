"""A plan keeps its objective, says what it needs, and is refused where nothing would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli.operate.cluster_file import read_cluster_file
from cluster.cli.operate.serve_file import read_serve_file
from cluster.cli.planning.plan_files import aws, onprem, rows_of_cell, write_plan
from cluster.errors import ConfigurationError
from cluster.planning.plan.design import Design, costs_of, least_workers, sample
from cluster.planning.plan.nodes import nodes_of
from cluster.planning.plan.order import (
    CellLoads,
    NodeKind,
    Objective,
    Order,
    parse_kinds,
    parse_link,
    parse_objectives,
    parse_rate,
    rate_of_trace,
)
from cluster.planning.plan.planner import Planned, make_plan
from cluster.planning.plan.report import figures_of, lines_of
from cluster.planning.scenario import Lengths, Load
from tests.unit.planning.test_simulation import ENCODE_S, make_profile

CLIPS = Lengths(median_s=5.0, sigma=0.0)


def make_order(rate: float = 15.0, limit_s: float = 1.0, **changes: Any) -> Order:
    kind = NodeKind("test", 1.0, make_profile())
    load = Load(rate_per_s=rate, lengths=CLIPS)
    fields: dict[str, Any] = {
        "load": load,
        "objectives": (Objective(95, limit_s),),
        "kinds": (kind,),
        "link_gbit_per_s": 100.0,
        "trial_requests": 300,
    }
    return Order(**fields | changes)


def planned(folder: Path, order: Order, check_s: float = 15.0) -> Planned:
    return make_plan(order, CellLoads(order, folder), check_s, lambda _: None)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    return planned(tmp_path_factory.mktemp("plan"), make_order(placements=("split",)))


@pytest.mark.parametrize(
    ("text", "per_s"), [("500/s", 500.0), ("0.5", 0.5), ("30000/min", 500.0), ("7200 / h", 2.0)]
)
def test_a_rate_has_its_unit(text: str, per_s: float) -> None:
    assert parse_rate(text) == pytest.approx(per_s)


def test_objectives_and_links_are_read() -> None:
    objectives = parse_objectives("p50 < 400 ms, p99.9<2 s")
    assert [(one.percent, one.seconds) for one in objectives] == [(50, 0.4), (99.9, 2.0)]
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


def test_no_plan_has_fewer_workers_than_can_be_computed(split: Planned) -> None:
    """15 requests a second of 0.1 s each fill one and a half encoders."""
    assert split.best.size is not None
    assert split.best.size.encoders == 2
    assert split.best.size.decoders == 1
    design, order = split.best.design, split.order
    costs = costs_of(design, sample(order.load))
    assert costs.encode_s == pytest.approx(ENCODE_S)
    assert least_workers(design, costs, 15.0)[0] == 2


def test_a_plan_keeps_its_objective_in_the_check_and_when_nodes_are_lost(split: Planned) -> None:
    assert split.check.is_kept
    assert split.check.n_failed == 0
    assert split.loss is not None
    assert split.loss.n_failed == 0
    lost = [one["what"] for one in split.loss.figures["decisions"]]
    assert lost == ["encoder-0 is killed", "decoder-0 is killed"]
    assert split.check.at(50) >= split.floor.at(50)


def test_the_report_says_what_saturates_next(split: Planned) -> None:
    figures = figures_of(split, 1.0)
    assert figures["saturates"][0]["what"] == "encoders"
    assert figures["saturates"][0]["at_rate_per_s"] == pytest.approx(2 / ENCODE_S, rel=0.01)
    assert figures["encoders"]["needed"] == 2
    assert figures["encoders"]["spare"] == 1
    assert figures["cost"]["dollars_per_hour"] == 5.0, "two and one, and a spare of each"
    text = "\n".join(lines_of(figures))
    assert "encoders saturate at 20" in text
    assert "predicted, not measured" in text
    json.dumps(figures)


def test_the_files_of_a_plan_pass_the_checks_of_who_starts_them(
    split: Planned, tmp_path: Path
) -> None:
    write_plan(split, figures_of(split, 1.0), tmp_path / "plan", "onprem")
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


def test_a_plan_for_aws_has_its_nodes_or_says_that_there_is_none(split: Planned) -> None:
    rows = rows_of_cell(nodes_of(split.order, split.best), 1)
    with pytest.raises(ConfigurationError, match="no AWS node with 1 x test"):
        aws(rows, 8)
    (kind,) = parse_kinds("l40s:0.6", "large-v3")
    design = Design("split", kind, kind)
    order = make_order(kinds=(kind,))
    found = split.best.__class__(
        design, split.best.costs, 1, split.best.least, split.best.size, None
    )
    content = yaml.safe_load(aws(rows_of_cell(nodes_of(order, found), 1), 8))
    node = content["available_node_types"]["encoder"]
    assert (node["min_workers"], node["node_config"]["InstanceType"]) == (3, "g6e.2xlarge")
    gpu_line = next(line for line in onprem(rows).splitlines() if "flashinfer" in line)
    assert gpu_line.startswith("  - "), "a comment no more"


def test_colocated_workers_are_cells_of_one(tmp_path: Path) -> None:
    plan = planned(tmp_path, make_order(placements=("colocated",)))
    assert plan.best.cells >= 2
    assert plan.best.workers() == plan.best.cells
    write_plan(plan, figures_of(plan, 1.0), tmp_path / "plan", "onprem")
    serve = read_serve_file(tmp_path / "plan/serve.yaml")
    assert serve.settings.placement == "colocated"
    assert serve.settings.encoder.replicas == 1
    assert len(read_cluster_file(tmp_path / "plan/cluster.yaml").worker_addresses) == 1


def test_what_nobody_can_keep_is_refused_with_the_floor(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"alone takes p95 0\.\d+ s"):
        planned(tmp_path, make_order(limit_s=0.05))


def test_too_small_a_cluster_is_said_to_be_too_small(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--max-workers"):
        planned(tmp_path, make_order(rate=60.0, most_workers=3))


def test_a_cell_gets_its_share_of_a_trace_and_a_trial_its_busiest_stretch(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    times = [float(n) for n in range(100)] + [50.0 + n / 10 for n in range(200)]
    file.write_text("\n".join(json.dumps({"at_s": t, "audio_s": 5.0}) for t in times))
    rate, seconds = rate_of_trace(file)
    assert rate == pytest.approx(300 / 99)
    load = Load(kind="trace", trace=file, rate_per_s=rate, seconds=seconds)
    loads = CellLoads(make_order(load=load), tmp_path)
    busy = loads.load(1, 20.0, seed=1)
    assert busy.rate_per_s == pytest.approx(11.0, rel=0.05)
    assert loads.load(2, 20.0, seed=1).rate_per_s == pytest.approx(5.5, rel=0.2)
