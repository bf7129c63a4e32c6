"""What all benchmarks' command lines share: help, tables, and a JSON line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser whose help is a module's docstring."""
    started = sys.modules["__main__"].__spec__  # None where a file was started, not a module
    return argparse.ArgumentParser(
        prog=None if started is None else f"python -m {started.name.removesuffix('.__main__')}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def print_table(rows: Iterable[Mapping[str, Any]], title: str = "") -> None:
    """Print rows with the same keys; a mapping among the values takes several columns."""
    flat = [dict(_columns(row)) for row in rows]
    table = Table(*dict.fromkeys(name for row in flat for name in row), title=title)
    for row in flat:
        table.add_row(*(_shown(row.get(str(column.header))) for column in table.columns))
    Console(width=170).print(table)


def _columns(row: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _columns(value, f"{prefix}{name} ")
        else:
            yield prefix + name.replace("_per_", "/").replace("_", " "), value


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_shown, value))
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def print_result(benchmark: str, figures: dict[str, Any]) -> None:
    print(json.dumps({"benchmark": benchmark, **figures}))
