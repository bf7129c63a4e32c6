"""The fences of the product: every place where a stream or the host waits for the device."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

from tests.support.gpu.operations import ROOT

PACKAGES = ("cluster", "encoder_worker", "decoder_worker")
WAITS = ("synchronize", "wait_event", "wait_stream", "has_come")
SEAM = "cluster/common/model/streams.py"  # defines them


@dataclass(frozen=True, order=True, slots=True)
class Fence:
    """A call, named so that it stays the same when lines move: the n-th such call of a function."""

    file: str
    function: str
    call: str
    nth: int

    def __str__(self) -> str:
        nth = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.file} {self.function}: {self.call}{nth}"


@cache
def fences() -> dict[Fence, tuple[int, int]]:
    """All of them, with the lines that each call takes."""
    found: dict[Fence, tuple[int, int]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if (file := str(path.relative_to(ROOT))) != SEAM:
                found |= _fences_of(file, path)
    return found


def _fences_of(file: str, path: Path) -> dict[Fence, tuple[int, int]]:
    found: dict[Fence, tuple[int, int]] = {}
    text = path.read_text(encoding="utf-8")
    if not any(wait in text for wait in WAITS):
        return found
    for name, function in _functions(ast.parse(text)):
        seen: dict[str, int] = {}
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda node: node.lineno):
            if (waits := _name_of(call)) in WAITS:
                seen[waits] = seen.get(waits, 0) + 1
                lines = (call.lineno, call.end_lineno or call.lineno)
                found[Fence(file, name, waits, seen[waits])] = lines
    return found


def _functions(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    found: list[tuple[str, ast.AST]] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((node.name, node))
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.append((f"{node.name}.{inner.name}", inner))
    return found


def _name_of(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def fence_at(frame: FrameType | None) -> Fence | None:
    """The fence that the calling code is in."""
    root = str(ROOT) + "/"
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if file.startswith(root) and file[len(root) :] != SEAM:
            for fence, (first, last) in fences().items():
                if fence.file == file[len(root) :] and first <= line <= last:
                    return fence
            if file[len(root) :].split("/")[0] in PACKAGES:
                return None
        frame = frame.f_back
    return None
