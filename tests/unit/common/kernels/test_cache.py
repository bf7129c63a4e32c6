"""The CPU engine starts, kernels and all, where nothing but /tmp can be written."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from numba.core.caching import _CacheLocator

from cluster.common.kernels.cpu import cache as jit_cache
from cluster.common.kernels.cpu.cache import (
    SHARED_SOURCES,
    VARIABLE,
    forget_stale_kernels,
    one_builder,
)
from cluster.demo.samples import sample_path, sample_text
from cluster.serve.distribution import package_root
from decoder_worker.cpu import compiled as decoder_sources
from encoder_worker.cpu import team as encoder_sources

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
        "from cluster.common.kernels.cpu.background import InBackground; "
        "import importlib; names = ('encoder_worker.cpu.team_kernels', "
        "'decoder_worker.cpu.fused_kernels'); "
        "b = InBackground('test', lambda: [importlib.import_module(n) for n in names]); "
        "print('kernels', bool(b.wait(100)))"
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


def write_sources(root: Path) -> tuple[Path, Path]:
    """A kernel's own file, and one of the shared floor that it calls."""
    kernel, called = (
        root / "decoder_worker" / "kernels.py",
        root / "cluster" / "kernels" / "rows.py",
    )
    for file in (kernel, called):
        file.parent.mkdir(parents=True)
        file.write_text("one = 1")
    return kernel, called


@pytest.mark.parametrize("changed", [0, 1])
def test_machine_code_of_other_sources_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: int
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    files = kernel, called = write_sources(tmp_path)
    folder = kernel.parent / "__pycache__"
    folder.mkdir()
    kept = folder / "kernels._run_head-1.py311.nbi"

    def is_kept() -> bool:
        kept.touch()
        forget_stale_kernels([kernel], [called])
        return kept.exists()

    assert not is_kept(), "nobody knows of which sources it is"
    assert is_kept()
    files[changed].write_text("one = 2")
    assert not is_kept()
    assert is_kept()


@pytest.mark.parametrize("is_writable", [True, False])
def test_code_kept_elsewhere_is_forgotten_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_writable: bool
) -> None:
    """In the operator's folder; or in the home, below which an upgrade finds the old version's."""
    elsewhere = tmp_path / "elsewhere"
    kernel, called = write_sources(tmp_path / "install")
    subpath = _CacheLocator.get_suitable_cache_subpath(str(kernel))
    if is_writable:
        monkeypatch.setenv(VARIABLE, str(elsewhere))
        folder = elsewhere / subpath
    else:
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere))
        monkeypatch.setattr(jit_cache, "_is_writable", lambda folder: False)
        folder = elsewhere / "numba" / subpath
    folder.mkdir(parents=True)
    kept = folder / "kernels._run_head-1.py311.nbi"
    forget_stale_kernels([kernel], [called])
    kept.touch()
    forget_stale_kernels([kernel], [called])
    assert kept.exists()
    called.write_text("one = 2")
    forget_stale_kernels([kernel], [called])
    assert not kept.exists()


@pytest.mark.parametrize(
    ("package", "registered"),
    [
        ("cluster", SHARED_SOURCES),
        ("encoder_worker", encoder_sources.KERNEL_SOURCES),
        ("decoder_worker", decoder_sources.KERNEL_SOURCES),
    ],
)
def test_every_source_of_kernels_is_registered(package: str, registered: tuple[Path, ...]) -> None:
    """Of their functions, and of the constants that they read."""
    root = package_root()
    found = {
        file
        for file in (root / package).rglob("*.py")
        if "njit(" in file.read_text() or "from numba" in file.read_text()
    } - {
        root / "cluster" / "common" / "kernels" / "cpu" / "background.py"
    }  # loads kernels and has none
    for file in tuple(found):
        for node in ast.walk(ast.parse(file.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith(PACKAGES) and any(one.name.isupper() for one in node.names):
                found.add(root / f"{module.replace('.', '/')}.py")
    assert found
    assert found <= {*registered, *SHARED_SOURCES}


def test_one_process_builds_and_the_others_load_side_by_side(kept: Path, tmp_path: Path) -> None:
    """The second waits for the first; once something was built nobody waits for anybody."""
    source = tmp_path / "kernel.py"
    source.write_text("x = 1")
    forget_stale_kernels([source], SHARED_SOURCES)
    inside, may_end, order = threading.Event(), threading.Event(), []

    def first() -> None:
        with one_builder("these uint16", [source]):
            inside.set()
            may_end.wait(60)
            order.append("first")

    def second() -> None:
        with one_builder("these uint16", [source]):
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
        one_builder("others", [source]),
        one_builder("these uint16", [source]),
        one_builder("these uint16", [source]),
    ):
        pass  # neither waits for the one that builds others


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where numba is told to keep what it compiles."""
    folder = tmp_path / "kept"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder
