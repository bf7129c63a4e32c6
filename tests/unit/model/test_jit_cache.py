"""The CPU engine starts, kernels and all, where nothing but /tmp can be written."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.caching import _CacheLocator

from cluster.build import package_root
from cluster.demo.samples import sample_path, sample_text
from cluster.model import jit_cache
from cluster.model.jit_cache import KERNELS, VARIABLE, ensure_jit_cache, forget_stale_kernels

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
        "from cluster.model.jit import InBackground; "
        "import importlib; names = ('encoder_worker.team_kernels', 'decoder_worker.step_kernels'); "
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
    said = run("-m", "cluster.cli", "transcribe", str(sample_path("short")), "-o", str(tmp_path))
    assert said.returncode == 0, said.stderr
    assert sample_text("short") in (tmp_path / "short.txt").read_text().replace("\n", " ")


def test_a_folder_that_the_operator_names_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    ensure_jit_cache()
    assert os.environ[VARIABLE] == str(tmp_path)


def test_a_home_that_can_be_written_is_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ensure_jit_cache()
    assert VARIABLE not in os.environ


def test_machine_code_of_other_sources_is_forgotten(tmp_path: Path) -> None:
    for name in KERNELS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one = 1")
    folder = tmp_path / "decoder_worker" / "__pycache__"
    folder.mkdir()
    kept = folder / "fused_kernels._run_head-1.py311.nbi"

    def is_kept() -> bool:
        kept.touch()
        forget_stale_kernels(tmp_path)
        return kept.exists()

    assert not is_kept(), "nobody knows of which sources it is"
    assert is_kept()
    (tmp_path / "decoder_worker/fused_parts.py").write_text("one = 2")  # what that kernel calls
    assert not is_kept()
    assert is_kept()


@pytest.mark.parametrize("is_writable", [True, False])
def test_code_kept_elsewhere_is_forgotten_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_writable: bool
) -> None:
    """In the operator's folder; or in the home, below which an upgrade finds the old version's."""
    root, elsewhere = tmp_path / "install", tmp_path / "elsewhere"
    for name in KERNELS:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("one = 1")
    source = root / "decoder_worker" / "fused_kernels.py"
    if is_writable:
        monkeypatch.setenv(VARIABLE, str(elsewhere))
        folder = elsewhere / _CacheLocator.get_suitable_cache_subpath(str(source))
    else:
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere))
        monkeypatch.setattr(jit_cache, "_is_writable", lambda folder: False)
        folder = elsewhere / "numba" / _CacheLocator.get_suitable_cache_subpath(str(source))
    folder.mkdir(parents=True)
    kept = folder / "fused_kernels._run_head-1.py311.nbi"
    forget_stale_kernels(root)
    kept.touch()
    forget_stale_kernels(root)
    assert kept.exists()
    (root / "decoder_worker/step_team.py").write_text("one = 2")
    forget_stale_kernels(root)
    assert not kept.exists()


def test_every_source_of_kernels_is_known() -> None:
    """Of their functions, and of the constants that they read."""
    root = package_root()
    found = {
        file.relative_to(root).as_posix()
        for package in PACKAGES
        for file in (root / package).rglob("*.py")
        if "njit(" in file.read_text() or "from numba" in file.read_text()
    }
    for name in tuple(found):
        for node in ast.walk(ast.parse((root / name).read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith(PACKAGES) and any(one.name.isupper() for one in node.names):
                found.add(f"{module.replace('.', '/')}.py")
    assert found <= set(KERNELS)
