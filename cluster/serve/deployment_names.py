"""What the deployments of each model are called."""

from __future__ import annotations

import re
from collections.abc import Iterable


def deployment_suffixes(models: Iterable[str]) -> list[str]:
    """What is put behind the names of each model's deployments: nothing where there is one model.

    "a/b" and "a b" become "-a-b" and "-a-b-2".
    """
    found: list[str] = []
    for name in models:
        slug = suffix = "-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        number = 1
        while suffix in found:
            number += 1
            suffix = f"{slug}-{number}"
        found.append(suffix)
    return found or [""]
