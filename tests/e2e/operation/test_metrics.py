"""What the cluster exports is what dashboard and rules read, asked of a running one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from cluster.demo.samples import sample_path
from tests.e2e.conftest import Server, wait_until
from tests.support.observability import (
    BATCHES,
    FOLDER,
    LIVE,
    RARE,
    SCALED,
    panel_queries,
    rule_queries,
    rules,
    spec_of,
)
from tests.support.programs import needs, require

QUIET = RARE | SCALED | LIVE | BATCHES
EXPORT_S = 40.0  # workers send their metrics every 10 s
SERIES = re.compile(r"^(\w+)\{(.*)\} ")
LABEL = re.compile(r'(\w+)="')


def metrics_addresses(server: Server) -> list[str]:
    token = Path("~/.ray/auth_token").expanduser().read_text().strip()
    nodes = httpx.get(
        f"{server.dashboard()}/nodes?view=summary",
        headers={"Authorization": f"Bearer {token}"},
        timeout=20,
    ).json()["data"]["summary"]
    return [f"{node['ip']}:{node['raylet']['metricsExportPort']}" for node in nodes]


def scrape(server: Server) -> dict[str, set[str]]:
    labels: dict[str, set[str]] = defaultdict(set)
    for address in metrics_addresses(server):
        for line in httpx.get(f"http://{address}/metrics", timeout=20).text.splitlines():
            if found := SERIES.match(line):
                labels[found[1]].update(LABEL.findall(found[2]))
    return labels


def use_everything(server: Server) -> None:
    client = server.client(max_retries=0)
    for name in ("short", "medium"):
        client.audio.transcriptions.create(model="whisper-1", file=sample_path(name))
    with pytest.raises(openai.NotFoundError):
        client.audio.transcriptions.create(model="nobody", file=sample_path("short"))


def test_panels_and_rules_find_their_series(server: Server) -> None:
    use_everything(server)
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    wanted = {
        name for query in panel_queries() + rule_queries() for name in query.names()
    } - recorded
    scraped: dict[str, set[str]] = {}

    def complete() -> bool:
        scraped.update(scrape(server))
        return not (wanted - scraped.keys() - QUIET)

    try:
        wait_until(complete, EXPORT_S, "every series")
    finally:
        assert not (wanted - scraped.keys() - QUIET)
    for query in panel_queries() + rule_queries():
        names = query.names() - recorded
        labels = set().union(*(scraped.get(name, set()) for name in names))
        quiet = (spec_of(name) for name in names & QUIET)
        rare = {tag for spec in quiet if spec is not None for tag in spec.tags}
        if names:
            assert query.labels() <= labels | rare | {"replica", "deployment"}, query


@pytest.mark.slow
@needs("prometheus")
def test_prometheus_answers_every_panel(server: Server, tmp_path: Path) -> None:
    use_everything(server)
    with prometheus(metrics_addresses(server), tmp_path) as url:

        def ask(expr: str) -> list[object]:
            answer = httpx.get(f"{url}/api/v1/query", params={"query": expr}, timeout=10).json()
            assert answer["status"] == "success", (expr, answer)
            found: list[object] = answer["data"]["result"]
            return found

        def unanswered() -> list[str]:
            use_everything(server)
            return [
                query.where
                for query in panel_queries()
                if not query.names() & QUIET and not ask(query.expr)
            ]

        wait_until(lambda: not unanswered(), 90.0, "an answer to every panel")
        for query in panel_queries() + rule_queries():
            ask(query.expr)
        states = httpx.get(f"{url}/api/v1/rules", timeout=10).json()["data"]["groups"]
        loaded = [rule for group in states for rule in group["rules"]]
        assert len(loaded) == len(rules())
        assert not [rule for rule in loaded if rule["health"] == "err"]
        assert not [rule["name"] for rule in loaded if rule.get("state") == "firing"]


@contextmanager
def prometheus(addresses: list[str], folder: Path) -> Iterator[str]:
    with as_file(FOLDER / "rules.yaml") as file:
        shutil.copy(file, folder / "rules.yaml")
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": addresses}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    log = folder / "prometheus.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [
                require("prometheus"),
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=data",
                "--web.listen-address=127.0.0.1:0",
                "--log.format=json",
            ],
            cwd=folder,
            stderr=out,
        )
    try:

        def address() -> str | None:
            for line in log.read_text().splitlines():
                said = json.loads(line)
                if said.get("msg") == "Listening on":
                    return str(said["address"])
            return None

        yield f"http://{wait_until(address, 20.0, 'prometheus')}"
    finally:
        process.terminate()
        process.wait(20)
