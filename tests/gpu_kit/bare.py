"""Play a GPU machine before anybody has installed something, in this virtual environment.

Such a machine has `MACHINE` with its requirements. The GPU's tests and benchmark also need
`WANTED`, which the kit brings. Processes in a `bare_environment` see no other package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MACHINE = {  # a lent one with an H200, Python 3.12 and a driver for CUDA 13: packages by version
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "transformers": "5.17.0",
    "numba": "",  # of any version, as the rest
    "scikit-learn": "",
    "psutil": "",
    "requests": "",
    "pytest": "",
    "pytest-timeout": "",
}
PYTHON = "3.12"
THERE = tuple(MACHINE)
WANTED = (
    "librosa",
    "opentelemetry-api",
    "packaging",
    "pydantic",
    "pytest-asyncio",
    "pyyaml",
    "tqdm",
)
STARTUP = '''"""Written by tests.gpu_kit.bare: this process sees few packages."""
import sys
from importlib.machinery import PathFinder

HIDDEN = frozenset({hidden})


class Hide:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in HIDDEN:
            return None
        elsewhere = [place for place in sys.path if "site-packages" not in place]
        if found := PathFinder.find_spec(name, elsewhere):
            return found
        raise ModuleNotFoundError(f"No module named {{name!r}}, on a bare machine", name=name)


sys.meta_path.insert(0, Hide)
'''


def needed_by(names: Iterable[str], python: str = "") -> set[str]:
    """Return the distributions with all that they need, in their canonical spelling."""
    environment = environment_of(python)
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # of another platform, or nobody asked for it here
        found.add(name)
        for line in needs:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                waiting.append(requirement.name)
    return found


def environment_of(python: str) -> dict[str, str]:
    versions = {"python_version": python, "python_full_version": f"{python}.0"} if python else {}
    return {"extra": ""} | versions


def brought_along(python: str = PYTHON) -> list[str]:
    """Return what the kit brings besides flashinfer, sorted.

    What transformers needs is brought too, because its versions differ in that.
    """
    there = needed_by(set(THERE) - {"transformers"}, python)
    return sorted(needed_by(WANTED, python) - there)


def bare_environment(folder: Path, wanted: Iterable[str] = WANTED) -> dict[str, str]:
    """Return the environment of a process on a bare machine that sees `wanted` besides `THERE`.

    `folder` is an empty one, which must stay while processes run.
    """
    seen = needed_by((*THERE, *wanted))
    hidden = [
        module
        for module, owners in packages_distributions().items()
        if not seen & {canonicalize_name(owner) for owner in owners}
    ]
    (folder / "sitecustomize.py").write_text(STARTUP.format(hidden=json.dumps(sorted(hidden))))
    return {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # pytest would load those of hidden packages
        "PYTEST_ADDOPTS": "-p pytest_asyncio.plugin -p pytest_timeout",
    }
