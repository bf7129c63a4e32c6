"""Print a CycloneDX document of the packages that an installation without `dev` has here.

    python tests/support/sbom.py

It imports nothing of the project, so that it runs in an image too.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from packaging.requirements import Requirement

ROOT = "splitscribe"
EXTRAS = ("bulk", "gpu")  # of the images; where one is not installed, its packages are not here


def installed(name: str, extras: tuple[str, ...] = ()) -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, tuple[str, ...]]] = set()
    waiting = [(name, extras)]
    while waiting:
        name, extras = waiting.pop()
        name = re.sub(r"[-_.]+", "-", name).lower()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # of an extra that is not installed
            continue
        for line in found[name].requires or ():
            needed = Requirement(line)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": one}) for one in ("", *extras)):
                waiting.append((needed.name, tuple(sorted(needed.extras))))
    return found


def component(name: str, found: Distribution, kind: str = "library") -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{found.version}"
    told: dict[str, Any] = {"type": kind, "bom-ref": purl, "name": name, "version": found.version}
    if expression := found.metadata.get("License-Expression"):
        told["licenses"] = [{"expression": expression}]
    elif licence := (found.metadata.get("License") or "").strip():
        told["licenses"] = [{"license": {"name": licence.splitlines()[0]}}]
    return {**told, "purl": purl}


def document() -> dict[str, Any]:
    found = installed(ROOT, EXTRAS)
    root = found.pop(ROOT)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(ROOT, root, "application")},
        "components": [component(name, found[name]) for name in sorted(found)],
    }


if __name__ == "__main__":
    json.dump(document(), sys.stdout, indent=1)
