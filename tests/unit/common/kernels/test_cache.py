"""The CPU engine starts, kernels and all, where nothing but /tmp can be written."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from numba import config

from cluster.common.kernels.cpu import cache as jit_cache
from cluster.common.kernels.cpu.cache import (
    N_OTHERS,
    SOURCES,
    VARIABLE,
    ensure_jit_cache,
    one_builder,
)
from cluster.demo.samples import sample_path, sample_text
from cluster.serve.distribution import package_root

PACKAGES = ("cluster", "encoder_worker", "decoder_worker")
MOUNT = """\
set -e
mount --make-rprivate /
for folder in {folders}; do mount --bind $folder $folder; mount -o remount,bind,ro $folder; done
exec "$@"
"""


def is_root_with_namespaces() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not is_root_with_namespaces(), reason="needs Linux, root and namespaces")
def test_a_read_only_install_without_a_home_has_its_kernels(tmp_path: Path) -> None:
    folders = " ".join({str(package_root()), sys.prefix})
    code = (
        "import logging; logging.basicConfig(level=logging.INFO, force=True); "
        "from encoder_worker.mel import LogMel; LogMel(80); "
        "from cluster.common.kernels.cpu.machine_code import built; "
        "import importlib; names = ('encoder_worker.cpu.team_kernels', "
        "'decoder_worker.cpu.fused_kernels'); "
        "b = built('test', '', lambda: [importlib.import_module(n) for n in names]); "
        "print('kernels', bool(b))"
    )
    environment = {k: v for k, v in os.environ.items() if k not in (VARIABLE, "XDG_CACHE_HOME")}
    environment |= {"HOME": "/proc/none", "PYTHONPATH": str(package_root())}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        script = ["unshare", "--mount", "bash", "-c", MOUNT.format(folders=folders), "-"]
        return subprocess.run(
            [*script, sys.executable, *command],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    kernels = run("-c", code)
    assert kernels.stdout == "kernels True\n", kernels.stderr
    assert VARIABLE in kernels.stderr
    said = run(
        *("-m", "cluster.cli.main", "transcribe", str(sample_path("short"))),
        *("--model", "demo", "-o", str(tmp_path)),
    )
    assert said.returncode == 0, said.stderr
    assert sample_text("short") in (tmp_path / "short.txt").read_text().replace("\n", " ")


def test_each_state_of_the_sources_has_a_folder(
    monkeypatch: pytest.MonkeyPatch, kept: Path, tmp_path: Path
) -> None:
    """Of a kernel's own file, or of one of the floor that it calls."""
    monkeypatch.setattr(jit_cache, "_ROOT", tmp_path)
    files = [tmp_path / pattern.replace("*", "kernels") for pattern in SOURCES]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("one = 1")
    first = ensure_jit_cache()
    assert first == ensure_jit_cache(), "so that children keep what they inherit"
    assert first.parent == kept
    for file in files:
        file.write_text("one = 2")
        changed = ensure_jit_cache()
        assert changed != first
        assert os.environ[VARIABLE] == config.CACHE_DIR == str(changed)
        file.write_text("one = 1")
        os.environ[VARIABLE] = str(kept)
        assert ensure_jit_cache() == first


def test_folders_of_the_versions_used_last_stay(
    monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    """And whatever else the operator has there."""
    other = kept / "splitscribe-uploads"
    other.mkdir(parents=True)
    folders = []
    for version in "abcde":
        monkeypatch.setattr(jit_cache, "_digest", lambda version=version: version)
        monkeypatch.setenv(VARIABLE, str(kept))
        folders.append(ensure_jit_cache())
        for age, folder in enumerate(reversed(folders)):
            if folder.exists():
                os.utime(folder, (1e9 - age, 1e9 - age))
    assert set(kept.iterdir()) == {other, *folders[-1 - N_OTHERS :]}


def test_where_the_install_cannot_be_written_the_home_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(jit_cache, "__file__", "/proc/none/cache.py")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(config, "CACHE_DIR", "")
    assert ensure_jit_cache().parent == tmp_path / "numba"


@pytest.mark.parametrize("package", ["cluster", "encoder_worker", "decoder_worker"])
def test_every_source_of_kernels_is_registered(package: str) -> None:
    """Of their functions, and of the constants and named tuples that they read."""
    root = package_root()
    found = {
        file
        for file in (root / package).rglob("*.py")
        if "njit(" in file.read_text() or "from numba" in file.read_text()
    }
    for file in tuple(found):
        for node in ast.walk(ast.parse(file.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith(PACKAGES) and not all(one.name.islower() for one in node.names):
                found.add(root / f"{module.replace('.', '/')}.py")
    assert found
    assert found <= {file for pattern in SOURCES for file in root.glob(pattern)}


def test_one_process_builds_and_the_others_load_side_by_side(kept: Path) -> None:
    """The second waits for the first; once something was built nobody waits for anybody."""
    inside, may_end, order = threading.Event(), threading.Event(), []

    def first() -> None:
        with one_builder("these", "uint16"):
            inside.set()
            may_end.wait(60)
            order.append("first")

    def second() -> None:
        with one_builder("these", "uint16"):
            order.append("second")

    threads = [threading.Thread(target=build) for build in (first, second)]
    threads[0].start()
    inside.wait(60)
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert order == ["first", "second"]
    with (
        one_builder("these", "float32"),
        one_builder("these", "uint16"),
        one_builder("others", "uint16"),
    ):
        pass  # neither waits for the one that builds others


def test_sources_that_are_written_anew_are_built_by_one_process_again(
    monkeypatch: pytest.MonkeyPatch, kept: Path, tmp_path: Path
) -> None:
    """As an update to the same version does: numba compiles what is older than its source."""
    monkeypatch.setattr(jit_cache, "_ROOT", tmp_path)
    source = tmp_path / SOURCES[1]
    source.parent.mkdir(parents=True)
    source.write_text("one = 1")
    lock = ensure_jit_cache() / "these.lock"

    def is_alone() -> bool:
        lock.unlink(missing_ok=True)
        with one_builder("these", "uint16"):
            return lock.exists()

    assert is_alone()
    assert not is_alone()
    os.utime(source, (1e9, 1e9))
    assert is_alone()


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where numba is told to keep what it compiles."""
    folder = tmp_path / "kept"
    monkeypatch.setenv(VARIABLE, str(folder))
    monkeypatch.setattr(config, "CACHE_DIR", str(folder))
    return folder
