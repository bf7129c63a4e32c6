"""The fences of the product: every place where a stream or the host waits for the device."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[3]
PACKAGES = ("cluster", "encoder_worker", "decoder_worker")
SEAM = "cluster/common/model/streams.py"  # defines the waits
WAIT = re.compile(r"\b(synchronize|wait_event|wait_stream|has_come)\(")


def product_files() -> list[Path]:
    """All that may come by the seam."""
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in found if str(path.relative_to(ROOT)) != SEAM]


@cache
def fences() -> dict[tuple[str, int], str]:
    """By file and line, names that stay when lines move: the n-th such call of a function."""
    found: dict[tuple[str, int], str] = {}
    for path in product_files():
        file, seen = str(path.relative_to(ROOT)), list[str]()
        owner = function = ""
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if defined := re.match(r"( {4})?(class|(?:async )?def) (\w+)", line):
                if not defined[1]:
                    function = defined[3]
                    owner = f"{function}." if defined[2] == "class" else ""
                elif owner:  # of functions in a function the outer one tells
                    function = owner + defined[3]
            elif call := WAIT.search(line):
                name = f"{file} {function}: {call[1]}"
                seen.append(name)
                nth = seen.count(name)
                found[file, number] = f"{name} ({nth})" if nth > 1 else name
    return found


def fence_at(frame: FrameType | None) -> str | None:
    """The fence that the calling code is in."""
    root = str(ROOT) + "/"
    while frame is not None:
        file = frame.f_code.co_filename.removeprefix(root)
        if file != SEAM and file.split("/")[0] in PACKAGES:
            return fences().get((file, frame.f_lineno))
        frame = frame.f_back
    return None
