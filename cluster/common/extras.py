"""How a person installs what only some need: the extras of pyproject.toml."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_command(extra: str = "") -> str:
    """For a shell, in any folder: of this checkout, or of the wheel that is installed here."""
    root = Path(__file__).resolve().parents[2]
    flags, source = ["-e"], str(root)
    if not (root / "pyproject.toml").is_file():
        flags, source = [], _wheel()
    source += f"[{extra}]" if extra else ""
    return shlex.join([sys.executable, "-m", "pip", "install", *flags, source])


def _wheel() -> str:
    """Its path, where pip has noted it and it is still there, or its name."""
    try:
        found = distribution("splitscribe")
    except PackageNotFoundError:
        return "splitscribe.whl"
    noted = json.loads(found.read_text("direct_url.json") or "{}").get("url", "")
    file = Path(unquote(urlsplit(noted).path))
    is_there = file.suffix == ".whl" and file.is_file()
    return str(file) if is_there else f"splitscribe-{found.version}-py3-none-any.whl"
