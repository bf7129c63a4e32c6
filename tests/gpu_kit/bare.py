"""A GPU machine as it is before anybody installs something, played in this virtual environment.

What such a machine has is `THERE` with what that needs; the GPU's tests and benchmark want `WANTED`
besides, which the kit brings along. `bare_environment` makes every process that is started with it,
and their children too, see no other package: no Ray, no NIXL, no tools of development.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

THERE = (  # with a driver: what a CUDA image for PyTorch usually has
    "torch",
    "triton",
    "transformers",
    "numba",
    "scikit-learn",
    "psutil",
    "requests",
    "pytest",
    "pytest-timeout",
)
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


def needed_by(names: Iterable[str]) -> set[str]:
    """The distributions, in their canonical spelling, with all that they need as installed here."""
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
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def brought_along() -> list[str]:
    """What the kit has to bring besides flashinfer, in order.

    What transformers needs is brought too: its versions differ in that.
    """
    return sorted(needed_by(WANTED) - needed_by(set(THERE) - {"transformers"}))


def bare_environment(folder: Path, wanted: Iterable[str] = WANTED) -> dict[str, str]:
    """Environment variables of a process on a bare machine with the kit's packages.

    Args:
        folder: an empty one, which must stay while processes run.
        wanted: what it sees besides `THERE`.
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
