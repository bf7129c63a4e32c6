"""The shipped dashboard and rules, and what names their PromQL speaks of."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from cluster.common.metrics import (
    BATCH_METRICS,
    CONTROLLER_METRICS,
    DECODER_METRICS,
    ENCODER_METRICS,
    ROUTER_METRICS,
    MetricSpec,
)

FOLDER = files("configs.observability")
SPECS = {
    f"ray_{spec.name}": spec
    for spec in (
        *ROUTER_METRICS,
        *BATCH_METRICS,
        *ENCODER_METRICS,
        *DECODER_METRICS,
        *CONTROLLER_METRICS,
    )
}
SERVE_LABELS = frozenset(("application", "deployment", "replica"))
# Counters of what goes wrong: no series until it does. Unit tests make each of them count.
RARE = frozenset(
    f"ray_splitscribe_{name}_total"
    for name in (
        "window_retries",
        "encoder_failed_windows",
        "expired_leases",
        "cache_evictions",
        "trimmed_windows",  # where a model's contexts are full
        "doubted_windows",
        "refused_notifications",
        "decode_fallbacks",
        "failed_sequences",
        "refused_handles",
        "live_refused",
        "key_requests",  # where there are API keys
        "key_audio_seconds",
    )
)
# No series where nobody has a live session.
LIVE = frozenset(
    f"ray_splitscribe_live_{name}"
    for name in (
        "hop_seconds",
        "updates_total",
        "update_seconds_bucket",
        "word_delay_seconds_bucket",
        "turns_total",
        "audio_seconds_total",
    )
)
# No series where nobody keeps files and batches.
BATCHES = frozenset(f"ray_{spec.name}" for spec in BATCH_METRICS)
# No series where no pool is scaled.
SCALED = frozenset(f"ray_{spec.name}" for spec in CONTROLLER_METRICS)
_WORDS = frozenset(("or", "and", "unless", "offset", "by", "on", "ignoring", "bool"))


@dataclass(frozen=True, slots=True)
class Query:
    where: str
    expr: str

    def names(self) -> set[str]:
        bare = re.sub(r'"[^"]*"', "", self.expr)
        bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on) \([^)]*\)|\boffset \w+", " ", bare)
        found = re.findall(r"(?<![\w.])[a-zA-Z_:][a-zA-Z0-9_:]*(?![a-zA-Z0-9_:]*\s*\()", bare)
        return {name for name in found if name not in _WORDS}

    def labels(self) -> set[str]:
        matched = re.findall(r"[{,]\s*(\w+)\s*[=!]~?", self.expr)
        grouped = [name for group in re.findall(r"by \(([^)]*)\)", self.expr)
                   for name in group.split(",")]  # fmt: skip
        return {name.strip() for name in (*matched, *grouped)} - {"le"}


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return content


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panel_queries() -> list[Query]:
    return [
        Query(f"panel {panel['title']!r}", target["expr"].replace("$__rate_interval", "1m"))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]


def rule_queries() -> list[Query]:
    return [Query(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]


def spec_of(name: str) -> MetricSpec | None:
    return SPECS.get(name) or SPECS.get(re.sub(r"_(bucket|sum|count)$", "", name))
