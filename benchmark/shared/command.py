"""What every benchmark's command line has in common: help that is its docstring, one JSON line."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring, as it stands, and the command that runs it."""
    started = sys.modules["__main__"].__spec__  # None where a file was started, not a module
    return argparse.ArgumentParser(
        prog=None if started is None else f"python -m {started.name.removesuffix('.__main__')}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def print_result(benchmark: str, figures: dict[str, Any], file: Path | None = None) -> None:
    """Print the figures as the last line, one JSON object; and write them into `file`."""
    result = {"benchmark": benchmark, **figures}
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
