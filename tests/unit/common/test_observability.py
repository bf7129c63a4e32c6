"""Dashboard, rules and runbook speak of metrics that there are, and leave none out."""

from __future__ import annotations

import re
import subprocess
from importlib.resources import as_file
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cluster.common.metrics import DECODER_METRICS, MetricSpec, Recorder
from cluster.serve.distribution import package_root
from tests.support.observability import (
    FOLDER,
    RARE,
    SERVE_LABELS,
    SPECS,
    Query,
    dashboard,
    panel_queries,
    rule_queries,
    rules,
    spec_of,
)
from tests.support.programs import needs, require

QUERIES = panel_queries() + rule_queries()
RECORDED = {rule["record"] for rule in rules() if "record" in rule}
needs_promtool = needs("promtool")


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_every_expression_reads_declared_metrics_with_their_labels(query: Query) -> None:
    allowed = set(SERVE_LABELS)
    for name in query.names() - RECORDED:
        spec = spec_of(name)
        assert spec is not None or name.startswith("ray_serve_"), f"{name} is not declared"
        if spec is not None:
            allowed.update(spec.tags)
            suffixed = name not in SPECS
            assert suffixed == (spec.kind == "histogram"), f"{name} is a {spec.kind}"
    assert query.names()
    assert query.labels() <= allowed, query.expr


def test_every_metric_is_shown() -> None:
    read = {name for query in panel_queries() for name in query.names()}
    shown = {spec_of(name) for name in read}
    assert not [name for name, spec in SPECS.items() if spec not in shown]


def test_rare_counters_are_declared() -> None:
    assert set(SPECS) >= RARE
    assert all(SPECS[name].kind == "counter" for name in RARE)


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    with as_file(FOLDER / "rules.yaml") as file:
        checked = subprocess.run([require("promtool"), "check", "rules", file], capture_output=True)
    assert checked.returncode == 0, checked.stderr.decode()


BUSY = {
    # A forged handle is the counter's first event: there is no zero before it.
    'ray_splitscribe_refused_handles_total{replica="d",reason="signature"}': "_x3 1x20",
    'ray_splitscribe_refused_handles_total{replica="d",reason="stale"}': "_x3 1x20",
    'ray_splitscribe_kv_pages_free{replica="d"}': "0x20",
    'ray_splitscribe_kv_pages{replica="d"}': "16x20",
    'ray_splitscribe_kv_pages_quarantined{replica="d"}': "0x20",
    'ray_splitscribe_decoder_waiting{replica="d"}': "3x20",
    'ray_splitscribe_requests_total{status="200"}': "0+90x20",
    'ray_splitscribe_requests_total{status="503"}': "0+10x20",
    'ray_splitscribe_requests_total{status="500"}': "0+10x20",
    'ray_splitscribe_errors_total{status="500",code="x"}': "0+10x20",
    'ray_splitscribe_errors_total{status="429",code="overloaded"}': "0+10x20",
    "ray_splitscribe_pending_requests": "1x20",
    "ray_splitscribe_pending_audio_seconds": "90x20",
    "ray_splitscribe_max_pending_audio_seconds": "100x20",
    "ray_splitscribe_windows_total": "0+100x20",
    'ray_splitscribe_window_retries_total{reason="full"}': "0+100x20",
    'ray_splitscribe_export_pages_free{replica="e"}': "8x20",
    'ray_splitscribe_export_pages{replica="e"}': "16x20",
    "ray_splitscribe_expired_leases_total": "2x20",
    'ray_splitscribe_refused_notifications_total{reason="unknown_lease"}': "0+5x20",
    'ray_serve_deployment_status{application="splitscribe",deployment="encoder"}': "6x20",
    # A version that could not be built: its deployments are the old ones.
    'ray_serve_application_status{application="splitscribe"}': "1x20",
    # A new version, which takes its time.
    'ray_serve_deployment_status{application="splitscribe",deployment="decoder"}': "3x20",
    'ray_splitscribe_encoder_queue_seconds_bucket{deployment="encoder",le="5.0"}': "0+10x20",
    'ray_splitscribe_encoder_queue_seconds_bucket{deployment="encoder",le="+Inf"}': "0+10x20",
    'ray_splitscribe_encoder_busy_seconds_total{deployment="encoder-a"}': "0+55x30",
    'ray_splitscribe_decoder_busy_seconds_total{deployment="decoder-a"}': "0+50x30",
    # Another model that nobody uses.
    'ray_splitscribe_encoder_busy_seconds_total{deployment="encoder-b"}': "0x30",
    'ray_splitscribe_decoder_busy_seconds_total{deployment="decoder-b"}': "0x30",
    # A first refusal, too.
    'ray_splitscribe_live_refused_total{code="overloaded"}': "_x5 2x20",
    'ray_splitscribe_live_word_delay_seconds_bucket{le="3.0"}': "0+9x20",
    'ray_splitscribe_live_word_delay_seconds_bucket{le="5.0"}': "0+10x20",
    'ray_splitscribe_live_word_delay_seconds_bucket{le="+Inf"}': "0+10x20",
    'ray_splitscribe_live_turns_total{outcome="completed"}': "0+100x20",
    'ray_splitscribe_live_turns_total{outcome="failed"}': "0+1x20",
    'ray_splitscribe_batches_paused{replica="b"}': "0x20",
    'ray_splitscribe_batch_webhooks_total{outcome="put_off"}': "0+1x20",
}
BROKEN = {
    'ray_splitscribe_requests_total{status="200"}': "0+100x20",
    'ray_splitscribe_errors_total{status="504",code="deadline_exceeded"}': "0+1x20",
    'ray_splitscribe_errors_total{status="504",code="timeout_exceeded"}': "0+10x20",
    'ray_splitscribe_errors_total{status="429",code="insufficient_quota"}': "0+10x20",
    "ray_splitscribe_windows_total": "0+100x20",
    'ray_splitscribe_window_retries_total{reason="WorkerGoneError"}': "0+10x20",
    'ray_splitscribe_kv_pages_quarantined{replica="d"}': "4x20",
    'ray_splitscribe_export_pages_free{replica="e"}': "0x20",
    'ray_splitscribe_export_pages{replica="e"}': "16x20",
    "ray_splitscribe_expired_leases_total": "_x5 9x20",
    'ray_splitscribe_refused_notifications_total{reason="malformed"}': "_x5 1x20",
    'ray_serve_deployment_status{application="splitscribe",deployment="encoder"}': "2x20",
    'ray_serve_application_status{application="splitscribe"}': "2x20",
    'ray_splitscribe_encoder_queue_seconds_bucket{deployment="encoder",le="20.0"}': "0+1x20",
    'ray_splitscribe_encoder_queue_seconds_bucket{deployment="encoder",le="50.0"}': "0+10x20",
    'ray_splitscribe_encoder_queue_seconds_bucket{deployment="encoder",le="+Inf"}': "0+10x20",
    'ray_splitscribe_encoder_busy_seconds_total{deployment="encoder"}': "0+58x30",
    'ray_splitscribe_decoder_busy_seconds_total{deployment="decoder"}': "0+6x30",
    'ray_splitscribe_live_word_delay_seconds_bucket{le="1.0"}': "0+10x20",
    'ray_splitscribe_live_word_delay_seconds_bucket{le="+Inf"}': "0+10x20",
    'ray_splitscribe_live_turns_total{outcome="completed"}': "0+9x20",
    'ray_splitscribe_live_turns_total{outcome="failed"}': "0+1x20",
    'ray_splitscribe_batches_paused{replica="b"}': "1x20",
    'ray_splitscribe_batch_webhooks_total{outcome="given_up"}': "_x5 1x20",
}
FIRING: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "busy": (
        BUSY,
        {
            "SplitscribeReplicaUnhealthy": "page application=splitscribe",
            "SplitscribeForgedHandles": "page reason=signature",
            "SplitscribeDecodersBehind": "warn replica=d",
            "SplitscribeErrors": "page",
            "SplitscribeRefusing": "page",
            "SplitscribeNearlyFull": "warn",
            "SplitscribeLiveRefused": "warn",
            "SplitscribeLiveLate": "warn",
        },
    ),
    "broken": (
        BROKEN,
        {
            "SplitscribeGone": "page",
            "SplitscribeReplicaUnhealthy": "page deployment=encoder",
            "SplitscribeDeadlines": "page",
            "SplitscribeEncodersBehind": "warn deployment=encoder",
            "SplitscribeExportPoolFull": "warn replica=e",
            "SplitscribePoolsOutOfBalance": "info deployment=encoder",
            "SplitscribeWindowsRetried": "warn",
            "SplitscribePagesQuarantined": "warn replica=d",
            "SplitscribeLeasesExpire": "warn",
            "SplitscribeStrayNotifications": "page",
            "SplitscribeLiveTurnsFail": "page",
            "SplitscribeBatchesPaused": "page",
            "SplitscribeWebhooksGivenUp": "warn",
        },
    ),
}


def alert_of(told: str) -> dict[str, Any]:
    """ "warn replica=d": labels as promtool wants them."""
    severity, *labels = told.split()
    return {"exp_labels": dict([("severity", severity), *(one.split("=") for one in labels)])}


@needs_promtool
@pytest.mark.parametrize("case", FIRING)
def test_alerts_fire_when_they_should_and_not_else(case: str, tmp_path: Path) -> None:

    def unannotated(rule: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in rule.items() if key != "annotations"}

    bare = {"groups": [{"name": "all", "rules": [unannotated(rule) for rule in rules()]}]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(bare))
    series, firing = FIRING[case]
    cases = [
        {
            "eval_time": "25m" if name == "SplitscribePoolsOutOfBalance" else "12m",
            "alertname": name,
            "exp_alerts": [alert_of(firing[name])] if name in firing else [],
        }
        for name in (rule["alert"] for rule in rules() if "alert" in rule)
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    tests = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": inputs, "alert_rule_test": cases}],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [require("promtool"), "test", "rules", "tests.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_counter_follows_a_total_that_somebody_else_counts() -> None:
    counted: list[tuple[float, Any]] = []

    def make(spec: MetricSpec) -> Any:
        return SimpleNamespace(inc=lambda value, tags: counted.append((value, tags)))

    recorder = Recorder(DECODER_METRICS, make)
    name = "splitscribe_refused_handles_total"
    for signature, layout in ((0, 0), (2, 0), (2, 1), (5, 1)):
        recorder.total(name, signature, reason="signature")
        recorder.total(name, layout, reason="layout")
    of = {"signature": {"reason": "signature"}, "layout": {"reason": "layout"}}
    assert counted == [(2, of["signature"]), (1, of["layout"]), (3, of["signature"])]


def test_the_runbook_has_each_alert_once_and_in_order() -> None:
    book = (package_root() / "configs" / "RUNBOOK.md").read_text()
    sections = re.findall(r"^## (Splitscribe\w+)$", book, re.MULTILINE)
    assert sections == [rule["alert"] for rule in rules() if "alert" in rule]
    titles = {panel["title"] for panel in dashboard()["panels"]}
    for section in book.split("\n## ")[2:]:
        assert "- Look" in section, section
        assert "o: " in section, section
    named = set(re.findall(r"(?<!\*)\*([A-Z][\w ,]+)\*", book))
    assert named - {"Serve", "Cluster", "Actors", "Logs"} <= titles
