"""How openai/whisper's command lines are read: their spelling, and their values True and None.

`--word_timestamps True`, `--word-timestamps true` and `--word-timestamps` alone mean the same, and
so do underscores and dashes everywhere. Knows no single flag.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

SWITCH = "True|False"  # the metavar by which a command's switches are known

T = TypeVar("T")


class Switch(StrEnum):
    """A value of openai/whisper's switches."""

    true = "True"
    false = "False"

    def __bool__(self) -> bool:
        return self is Switch.true


class WhisperCommand(TyperCommand):
    """A command whose flags are declared with dashes, and whose switches have `SWITCH`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name for param in self.params for name in param.opts if name.startswith("--")}
        switches = {name for param in self.params if param.metavar == SWITCH for name in param.opts}
        return super().parse_args(ctx, normalised(args, options, switches))


def normalised(
    args: Sequence[str], options: Collection[str], switches: Collection[str]
) -> list[str]:
    """Every flag with dashes, every switch with its value: `--no-x` is `--x=False`."""
    plain: list[str] = []
    for i, arg in enumerate(args):
        if arg == "--":
            return [*plain, *args[i:]]
        name, equals, value = arg.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        positive = "--" + name.removeprefix("--no-")
        if name in switches and not equals and not _is_bool(args[i + 1 : i + 2]):
            plain.append(f"{name}=True")
        elif name in options:
            plain.append(name + equals + value)
        elif name.startswith("--no-") and positive in switches and not equals:
            plain.append(f"{positive}=False")
        else:
            plain.append(arg)
    return plain


def _is_bool(args: Sequence[str]) -> bool:
    return bool(args) and args[0].lower() in ("true", "false")


def number(
    kind: Callable[[str], T], least: float | None = None, most: float | None = None
) -> Callable[[str], T | None]:
    """A parser of numbers within bounds, which takes None too, as openai/whisper's do."""
    wanted = "a whole number" if kind is int else "a number"
    if least is not None:
        wanted += f" from {least:g}"
    if most is not None:
        wanted += f" to {most:g}"

    def parse(text: str) -> T | None:
        if str(text).lower() == "none":
            return None
        try:
            value: Any = kind(text)
        except ValueError:
            value = None
        is_below = value is None or (least is not None and not value >= least)
        if is_below or (most is not None and not value <= most):
            raise typer.BadParameter(f"{text!r} is not {wanted}")
        parsed: T = value
        return parsed

    return parse
