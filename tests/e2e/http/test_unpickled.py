"""What comes from outside is never unpickled: it stays bytes, whatever it looks like."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.common.kv.layout import PageLayout
from cluster.demo.samples import sample_path
from cluster.serve.distribution import PACKAGES, package_root
from tests.support.in_process import in_process_server
from tests.support.kv.ends import MemoryExporter

UNSAFE_MODULES = frozenset(("pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal"))
UNSAFE_CALLS = frozenset(("eval", "exec", "compile", "__import__"))


class Trap:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_pickles_in_every_part_of_a_request_stay_bytes(tmp_path: Path) -> None:
    marker = tmp_path / "sprung"
    trap = pickle.dumps(Trap(marker))
    text = pickle.dumps(Trap(marker), protocol=0).decode("latin-1")
    texts = ("model", "language", "prompt", "hotwords", "response_format", "chunking_strategy", "x")
    with in_process_server() as url, httpx.Client(base_url=url, timeout=60) as client:
        path = "/v1/audio/transcriptions"
        form = {"model": "whisper-1", "language": "en"}
        good = {"file": ("short.flac", sample_path("short").read_bytes())}
        answers = [
            client.post(path, data=form, files={"file": ("a.wav", trap)}),
            client.post(path, data=form, files={"file": ("a.npy", b"\x93NUMPY" + trap)}),
            client.post(path, data=form, files={"file": (text, trap, text.split()[0])}),
            client.post(path, content=trap, headers={"content-type": "application/x-pickle"}),
            client.post(path, headers={"x-request-id": text.split()[0]}, content=trap),
            *(client.post(path, data={**form, name: text}, files=good) for name in texts),
        ]
        assert client.post(path, data=form, files=good).status_code == 200
    # A prompt may be any text; whatever else came was refused.
    assert {answer.status_code for answer in answers} <= {200, 400, 404, 413, 415, 422}
    assert sum(answer.status_code == 200 for answer in answers) <= 2
    assert not marker.exists()


def test_a_pickle_among_notifications_is_counted_and_dropped(tmp_path: Path) -> None:
    marker = tmp_path / "sprung"
    exporter = MemoryExporter(PageLayout("m", 1, 1, 4, 10, 5, "float32"), 4, cluster_key=b"key")
    try:
        exporter.handle_notifications([pickle.dumps(Trap(marker))])
    finally:
        exporter.close()
    assert exporter.refused() == {"malformed": 1, "unknown_lease": 0}
    assert not marker.exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_of_ours_can_run_what_it_reads(package: str) -> None:
    for file in sorted((package_root() / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            where = f"{file}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not UNSAFE_MODULES & {name.name.split(".")[0] for name in node.names}, where
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in UNSAFE_MODULES, where
            elif isinstance(node, ast.Call):
                _check_call(node, where)


def _check_call(node: ast.Call, where: str) -> None:
    called = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    assert called not in UNSAFE_CALLS, where
    assert called not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), where
    assert called != "torch.load" or given.get("weights_only") == "True", where
    assert given.get("allow_pickle", "False") == "False", where
    assert given.get("trust_remote_code", "False") == "False", where
    assert given.get("shell", "False") == "False", where
