"""How openai/whisper's command lines are read: their spelling, and their values True and None.

`--word_timestamps True`, `--word-timestamps true` and `--word-timestamps` alone mean the same, and
so do underscores and dashes everywhere. Knows no single flag.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from typer.core import TyperCommand

SWITCH = "True|False"  # the metavar by which a command's switches are known


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
