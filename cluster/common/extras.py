"""How to install the optional extras of pyproject.toml."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from cluster.common.errors import ConfigurationError


def require_extra(extra: str, *modules: str) -> None:
    """Raise ConfigurationError if one of an extra's modules is missing; imports none."""
    for name in modules:
        if find_spec(name) is None:
            raise ConfigurationError(f"there is no package {name}: {install_command(extra)}")


def install_command(extra: str = "") -> str:
    """The command that installs this checkout, or the wheel in its folder, with an extra."""
    root = Path(__file__).resolve().parents[2]
    flags, source = ["-e"], str(root)
    if not (root / "pyproject.toml").is_file():
        flags, source = [], f"splitscribe-{version('splitscribe')}-py3-none-any.whl"
    source += f"[{extra}]" if extra else ""
    return shlex.join([sys.executable, "-m", "pip", "install", *flags, source])
