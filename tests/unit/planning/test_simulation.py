"""A simulated cell gives one result for one seed, loses nothing, and saturates where it must."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.planning import figures_as_yaml
from cluster.cli.planning import simulate as simulate_command
from cluster.planning.profile import Profile, load_profile
from cluster.planning.scenario import Arrival, Outcome, Scenario
from cluster.planning.simulate import simulate
from cluster.planning.virtual_time import STANDS_STILL, run_virtually

ENCODE_S = 0.1  # of a window: an encoder does ten a second
SIZES = {"median_s": 5.0, "sigma": 0.0}
TWO = {"replicas": 2}


def make_profile(**changes: Any) -> Profile:
    steps = [{"size": n, "positions": 1500, "seconds": 0.002 + 0.0005 * n} for n in (1, 16)]
    fields: dict[str, Any] = {
        "name": "test",
        "predicted": True,
        "source": "made up",
        "model": "test",
        "shape": {"n_audio_state": 64, "n_text_state": 64, "n_text_head": 2, "n_text_layer": 2},
        "page_frames": 125,
        "encoder": {
            "points": [{"size": 1, "positions": 1500, "seconds": ENCODE_S}],
            "max_batch": 1,
            "export_windows": 4,
        },
        "decoder": {"steps": steps, "prefills": steps, "max_batch": 16, "kv_windows": 16},
        "handoff": {"transport": "made up", "latency_s": 0.001, "bytes_per_s": 1e9},
        "router": {
            "request_s": 0.002,
            "hop_s": 0.001,
            "audio_request_s": 0.001,
            "audio_second_s": 0.0001,
        },
        "start_s": 3.0,
    }
    return Profile.model_validate(fields | changes)


def run(
    fields: dict[str, Any], rows: list[Arrival] | None = None, **changes: Any
) -> tuple[Outcome, dict[str, Any]]:
    fields.setdefault("load", {}).setdefault("lengths", SIZES)
    outcome = simulate(Scenario.model_validate(fields), make_profile(**changes), rows=rows)
    return outcome, outcome.summary()


def test_a_seed_gives_the_same_figures_and_another_one_does_not() -> None:
    load = {"rate_per_s": 8.0, "seconds": 15.0, "classes": {"interactive": 0.7, "bulk": 0.3}}
    fields = {"settings": {"router": TWO, "encoder": TWO, "decoder": TWO}}
    figures = [run({"load": dict(load), **fields, "seed": seed})[1] for seed in (1, 1, 2)]
    assert figures[0] == figures[1]
    assert figures[0]["classes"] != figures[2]["classes"]


def test_a_load_in_which_no_request_comes_has_its_figures() -> None:
    _, figures = run({"load": {"seconds": 10.0}}, rows=[])
    assert (figures["requests"], figures["classes"]) == (0, {})
    assert figures["utilisation"]["encoder_busy"] == 0.0


def test_one_request_takes_what_its_parts_take() -> None:
    _, figures = run({"load": {"rate_per_s": 0.2, "seconds": 30.0}})
    tokens = 2 + 16  # timestamps, and 5 s at 3.2 tokens a second
    expected_s = 0.002 + 0.0015 + 2 * 0.001 + ENCODE_S + 0.001 + (tokens + 1) * 0.0025
    n_bytes = 2 * 2 * 1500 * 64 * 2
    found = figures["classes"]["interactive"]
    assert found["p50_s"] == pytest.approx(expected_s + n_bytes / 1e9, rel=0.02)
    assert found["failed"] == {}


def test_clips_of_the_bundled_model_have_the_context_of_their_audio() -> None:
    """As the server gives them: a whole window takes its encoder four times as long."""
    profile = load_profile("two-cores")
    load = {"rate_per_s": 1.0, "seconds": 30.0, "lengths": SIZES}
    figures = simulate(Scenario.model_validate({"load": load}), profile).summary()
    whole_s = max(point.seconds for point in profile.encoder.points)
    assert figures["classes"]["interactive"]["p50_s"] < whole_s


def test_a_window_full_of_words_is_decoded_once() -> None:
    """Words that repeated themselves would be tried again at higher temperatures."""
    lengths = {"median_s": 29.0, "sigma": 0.0}
    _, figures = run({"load": {"rate_per_s": 0.05, "seconds": 100.0, "lengths": lengths}})
    tokens = 2 + round(29 * 3.2)
    expected_s = ENCODE_S + (tokens + 1) * 0.0025
    assert figures["classes"]["interactive"]["p99_s"] == pytest.approx(expected_s, rel=0.1)


def test_more_than_the_encoders_can_do_is_not_done() -> None:
    load = {"rate_per_s": 20.0, "seconds": 40.0}
    limit = {"router": {"max_pending_audio_s": 100.0}}
    _, one = run({"load": dict(load), "settings": limit, "slo_s": 5.5})
    found = one["classes"]["interactive"]
    assert found["throughput_per_s"] == pytest.approx(1 / ENCODE_S, rel=0.1)
    assert found["failed"]
    assert found["within_slo"] == pytest.approx(0.5, abs=0.1), "what was refused was not good"
    _, four = run({"load": dict(load), "settings": {"encoder": {"replicas": 4}}})
    assert four["classes"]["interactive"]["failed"] == {}
    assert four["goodput_per_s"] == pytest.approx(20.0, rel=0.15)


@pytest.mark.parametrize("routers", [1, 4])
def test_clips_go_before_the_tails_of_files(routers: int) -> None:
    """144 windows of 18 files wait, which are half a minute of work; the files lose nothing."""
    rows: list[Arrival] = [(0.1, 300.0, "interactive") for _ in range(18)]
    rows += [(1.0 + 0.7 * n, 5.0, "interactive") for n in range(25)]
    sizes = {"router": {"replicas": routers}}
    outcome, _ = run({"load": {"seconds": 20.0}, "settings": sizes}, rows)
    answers = outcome.answers["interactive"]
    assert max(late_s for _, audio_s, late_s in answers if audio_s == 5.0) < 0.5
    # 18 files of about 12 windows, and 25 clips, of 0.1 s each.
    assert max(late_s for _, audio_s, late_s in answers if audio_s == 300.0) < 27.0


def test_a_gpu_s_encoder_is_never_idle_under_a_backlog() -> None:
    rows: list[Arrival] = [(0.01 * n, 600.0, "bulk") for n in range(24)]
    fields = {
        "load": {"seconds": 10.0},
        "settings": {"router": {"audio_workers": 64}, "decoder": {"replicas": 8}},
    }
    outcome = simulate(Scenario.model_validate(fields), load_profile("large-v3-h200"), rows=rows)
    busy = [one["encoder_busy"] for one in outcome.moments if one["pending"] == len(rows)]
    assert sum(busy[1:]) / len(busy[1:]) > 0.98


def test_bulk_work_takes_no_place_of_those_whom_a_router_admits() -> None:
    rows: list[Arrival] = [(0.1, 600.0, "bulk")] * 12
    rows += [(1.0 + n, 5.0, "interactive") for n in range(10)]
    limit = {"router": {"max_pending_audio_s": 700.0}}
    _, figures = run({"load": {"seconds": 20.0}, "settings": limit}, rows)
    assert {name: one["failed"] for name, one in figures["classes"].items()} == {
        "bulk": {},
        "interactive": {},
    }
    assert figures["utilisation"]["most_pending"] >= len(rows) - 10


def test_nothing_is_encoded_twice_where_decoders_are_slow() -> None:
    """Sixty windows are more than the decoder takes: they wait in the router, without KV."""
    rows: list[Arrival] = [(0.5, 5.0, "interactive")] * 60
    steps = [{"size": n, "positions": 1500, "seconds": 0.4} for n in (1, 16)]
    decoder = {"steps": steps, "prefills": steps, "max_batch": 16, "kv_windows": 16}
    outcome, figures = run({"load": {"seconds": 10.0}}, rows, decoder=decoder)
    assert figures["classes"]["interactive"]["failed"] == {}
    encoded_s = sum(one["encoder_busy"] for one in outcome.moments)
    assert encoded_s == pytest.approx(60 * ENCODE_S, rel=0.05)


def test_a_router_s_backlog_wakes_pools_and_makes_them_grow() -> None:
    rows: list[Arrival] = [(5.0 + 0.01 * n, 300.0, "interactive") for n in range(12)]
    sizes = {"min_replicas": 0, "max_replicas": 6}
    outcome, figures = run(
        {
            "load": {"seconds": 20.0},
            "settings": {"encoder": sizes, "decoder": sizes, "scaling": {"to_zero_delay_s": 2.0}},
        },
        rows,
    )
    assert figures["classes"]["interactive"]["failed"] == {}
    told = [one["what"] for one in outcome.decisions]
    assert any(what.startswith("encoders: 1 to 0") for what in told), told
    assert any(what.startswith("encoders: 0 to") for what in told), told
    assert max(int(what.split()[-1]) for what in told if what.startswith("encoders")) >= 4, told


def test_a_pool_that_shrinks_gives_up_workers_that_are_starting_first() -> None:
    sizes = {"min_replicas": 1, "max_replicas": 4}
    rows: list[Arrival] = [(0.5, 5.0, "interactive")] * 100  # ten seconds of work
    rows += [(40.0, 5.0, "interactive")]
    fields = {
        "load": {"seconds": 45.0},
        "settings": {"encoder": sizes, "scaling": {"downscale_delay_s": 5.0}},
    }
    _, figures = run(fields, rows, start_s=30.0)
    told = [one["what"] for one in figures["decisions"]]
    assert told[0].startswith("encoders: 1 to")
    assert told[-1].endswith("to 1")
    assert {moment["encoders"] for moment in figures["moments"]} == {1}


def test_the_real_policy_adds_workers_and_takes_them_away() -> None:
    settings = {
        "encoder": {"replicas": 1, "max_replicas": 4},
        "scaling": {"downscale_delay_s": 10.0},
    }
    rows: list[Arrival] = [(n / 20, 5.0, "interactive") for n in range(400)]  # 20 a second
    rows += [(20.0 + n / 4, 5.0, "interactive") for n in range(160)]
    outcome, figures = run({"load": {"seconds": 60.0}, "settings": settings}, rows)
    sizes = [moment["encoders"] for moment in outcome.moments]
    assert max(sizes) > 1
    assert min(sizes[len(sizes) // 2 :]) < max(sizes)
    assert all(one["why"] for one in figures["decisions"])
    assert figures["classes"]["interactive"]["answered"] == outcome.n_requests


def test_colocated_roles_share_their_device() -> None:
    load = {"rate_per_s": 6.0, "seconds": 20.0}
    _, split = run({"load": dict(load)})
    _, together = run({"load": dict(load), "settings": {"placement": "colocated"}})
    busy = together["utilisation"]
    assert busy["encoder_busy"] == busy["decoder_busy"] > split["utilisation"]["encoder_busy"]
    assert together["classes"]["interactive"]["failed"] == {}


def test_windows_between_nodes_wait_for_the_link() -> None:
    slow = {"per_node": 1, "link_gbit_per_s": 0.05}
    _, figures = run(slow | {"load": {"rate_per_s": 1.0, "seconds": 10.0}})
    n_bytes = 2 * 2 * 1500 * 64 * 2
    assert figures["classes"]["interactive"]["p50_s"] >= ENCODE_S + 8 * n_bytes / 0.05e9


def test_waiting_for_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=STANDS_STILL):
        run_virtually(asyncio.Event().wait())


def test_the_command_takes_flags_over_its_file_and_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, report = tmp_path / "scenario.yaml", tmp_path / "report.json"
    file.write_text("settings: {decoder: {replicas: 2}}\nload: {rate_per_s: 50}\n")
    simulate_command(file, rate=4.0, seconds=10.0, encoders=2, json_file=report)
    figures = json.loads(report.read_text())
    assert figures["settings"]["encoder"] == figures["settings"]["decoder"] == TWO
    assert figures["requests"] < 100, "four a second"
    said = capsys.readouterr().out
    assert "profile two-cores (measured)" in said
    assert f"goodput_per_s: {figures['goodput_per_s']}" in said.splitlines()


def test_a_figure_of_nothing_is_shown_and_what_was_not_found_is_not() -> None:
    figures = {"goodput_per_s": 0.0, "requests": 0, "decisions": [], "cost": None}
    assert figures_as_yaml(figures, ("requests",)) == "goodput_per_s: 0.0\n"
