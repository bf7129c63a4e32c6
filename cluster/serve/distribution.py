"""Check that the packages on this node come from one distribution, and identify its build.

Their names are generic: another `router.py`, earlier on the path, would be imported instead. Each
replica checks before it imports anything else of the project.
"""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cluster.common.errors import ConfigurationError

CODE_PACKAGES = ("cluster", "router", "encoder_worker", "decoder_worker")
PACKAGES = (*CODE_PACKAGES, "configs")
UNSHIPPED = "cluster/demo/recipe"  # in a checkout only, not in wheels


@cache
def package_root() -> Path:
    """Raises ConfigurationError: a package is missing, or comes from elsewhere."""
    root = Path(__file__).resolve().parents[2]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ConfigurationError(f"package {name!r} of splitscribe is not installed here")
        found = Path(spec.origin).resolve()
        if found != root / name / "__init__.py":
            raise ConfigurationError(
                f"package {name!r} comes from {found}, not from splitscribe in {root}: "
                f"start from another folder, or rename what hides it"
            )
    return root


@cache
def build_id() -> str:
    """Return the version with a digest of the source files."""
    root = package_root()
    digest = hashlib.sha256()
    for name in PACKAGES:
        for file in sorted((root / name).rglob("*.py")):
            if file.is_relative_to(root / UNSHIPPED):
                continue
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    try:
        number = version("splitscribe")
    except PackageNotFoundError:
        number = "source"
    return f"{number}+{digest.hexdigest()[:12]}"


def check_distribution(expected: str) -> None:
    """Raises ConfigurationError: this node's build is not `expected`."""
    found = build_id()
    if found != expected:
        raise ConfigurationError(
            f"this node runs splitscribe {found}, the cluster was started with {expected}: "
            f"install the same wheel on every node"
        )
