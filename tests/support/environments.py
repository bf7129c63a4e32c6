"""Python environments for programs of others, made by uv of their pins and nothing of this project.

Kept in `.works-with/` (`SPLITSCRIBE_WORKS_WITH`) until the pins change. A test is skipped where
no package index can be reached and nothing is installed yet.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("SPLITSCRIBE_WORKS_WITH", ROOT / ".works-with"))
COMPLETE = "complete"  # written last, so that a half-made environment is made again
WAY = "2"  # counts the changes of how environments are made
INSTALL_S = 900.0
OFFLINE = ("error sending request", "Network connectivity is disabled", "No interpreter found")
OF_OURS = ("PYTHON", "VIRTUAL_ENV", "COVERAGE", "OPENAI_", "SPLITSCRIBE_", "RAY_")


@dataclass(frozen=True, slots=True)
class Program:
    """requirements: the program's own pinned by `==`. python: the oldest it needs."""

    name: str
    requirements: tuple[str, ...]
    python: tuple[int, int] = (3, 11)

    @property
    def folder(self) -> Path:
        pins = "\n".join((WAY, *self.requirements)).encode()
        newest = max(self.python, sys.version_info[:2])
        python = "py" + "".join(map(str, newest))
        return FOLDER / f"{self.name}-{python}-{hashlib.sha256(pins).hexdigest()[:10]}"

    @property
    def interpreter(self) -> str:
        if self.python <= sys.version_info[:2]:
            return sys.executable
        wanted = ".".join(map(str, self.python))
        own = sorted(Path.home().glob(f".pyenv/versions/{wanted}.*/bin/python"))
        return str(own[-1]) if own else wanted


@dataclass(frozen=True, slots=True)
class Environment:
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    def script(self, name: str) -> str:
        path = self.folder / "bin" / name
        assert path.exists(), f"{path} is not there: {sorted(os.listdir(path.parent))}"
        return str(path)

    def variables(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment variables of a process in it: this one's without Python's and ours."""
        kept = _plain_variables()
        path = os.pathsep.join((str(self.folder / "bin"), kept.get("PATH", os.defpath)))
        return {**kept, "PATH": path, "PYTHONUNBUFFERED": "1", **(more or {})}

    def run(
        self,
        *arguments: str | Path,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.python), *map(str, arguments)],
            env=self.variables(env),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


def environment_of(program: Program) -> Environment:
    folder = program.folder
    if not (folder / COMPLETE).exists():
        with _alone(folder):
            if not (folder / COMPLETE).exists():  # nobody else has made it in the meantime
                _make(folder, program)
    return Environment(folder)


def _make(folder: Path, program: Program) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _uv("venv", "--quiet", "--no-project", "--python", program.interpreter, str(folder))
    python = str(folder / "bin/python")
    _uv("pip", "install", "--quiet", "--python", python, *program.requirements)
    (folder / COMPLETE).touch()


def _uv(*arguments: str) -> None:
    """Skips the running test where uv cannot do its work here."""
    uv = pytest.importorskip("uv", reason="needs uv: pip install -e '.[dev]'")
    done = subprocess.run(
        [uv.find_uv_bin(), *arguments],
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        env={**_plain_variables(), "UV_PYTHON_DOWNLOADS": "never"},
    )
    if any(reason in done.stderr for reason in OFFLINE):
        pytest.skip("no package index answers")
    assert done.returncode == 0, f"uv {' '.join(arguments)}:\n{done.stderr[-3000:]}"


def _plain_variables() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith(OF_OURS)}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
