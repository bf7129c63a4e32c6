"""Typer commands whose `--help` and errors are plain text, wrapped to the terminal.

Typer's own tables cut long names and take brackets for markup.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import cleandoc
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Stands for "-" while lines are wrapped, so that no name is broken.
HYPHEN = "\N{NON-BREAKING HYPHEN}"
TYPE = re.compile(r" <(?:list\[)?(\w+)(?: range)?\]?>")  # typer's types, such as <list[str]>
Row = tuple[str, tuple[str, str]]  # section, (name, text)


class PlainCommand(TyperCommand):
    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        with formatter.indentation():
            formatter.write_paragraph()
            formatter.write_text(cleandoc(self.help or "").replace("-", HYPHEN))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_sections(formatter, _options(self, ctx))

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(HYPHEN, "-")


def summary_of(command: Any) -> str:
    first, _, _ = " ".join((command.help or "").split()).partition(". ")
    return first.rstrip(".:")


class PlainGroup(TyperGroup):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_sections(formatter, [*_options(self, ctx), *self.rows()])

    def rows(self) -> Iterator[Row]:
        for name, command in self.commands.items():
            yield "Commands", (name, summary_of(command))


@dataclass(frozen=True, slots=True)
class Listed:
    """A command in the help; `module` has its function, command or application."""

    module: str
    summary: str
    panel: str = "Commands"


class ListedCommands(Mapping[str, Any]):
    def __init__(self, listed: Mapping[str, Listed]) -> None:
        self.listed = listed

    def __getitem__(self, name: str) -> Any:
        made = getattr(import_module(self.listed[name].module), name)
        if isinstance(made, TyperCommand):
            return made
        if not isinstance(made, typer.Typer):
            app = PlainTyper()
            app.command(name)(made)
            made = app
        return typer.main.get_command(made)

    def __iter__(self) -> Iterator[str]:
        return iter(self.listed)

    def __len__(self) -> int:
        return len(self.listed)


class ListedGroup(PlainGroup):
    listed: Mapping[str, Listed]

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.commands = ListedCommands(self.listed)  # type: ignore[assignment]

    def rows(self) -> Iterator[Row]:
        for name, one in self.listed.items():
            yield one.panel, (name, one.summary)


class PlainTyper(typer.Typer):
    def __init__(self, cls: type[TyperGroup] = PlainGroup, **more: Any) -> None:
        super().__init__(
            cls=cls,
            rich_markup_mode=None,
            add_completion=False,
            context_settings={"help_option_names": ["-h", "--help"]},
            **more,
        )

    def command(self, name: str | None = None, **more: Any) -> Callable[[_Function], _Function]:
        return super().command(name, **{"cls": PlainCommand, **more})


def _options(command: Any, ctx: Any) -> Iterable[Row]:
    for param in command.get_params(ctx):
        if record := param.get_help_record(ctx):
            name, text = record
            if param.param_type_name == "option":
                usual, name = "Options", TYPE.sub(r" <\1>", name)
            else:
                usual, name = "Arguments", TYPE.sub("", name)
            panel = _named(getattr(param, "rich_help_panel", None), usual)
            yield panel, (name, text.replace("-", HYPHEN))


def _named(panel: Any, usual: str) -> str:
    return panel if isinstance(panel, str) else usual


def _write_sections(formatter: Any, rows: Iterable[Row]) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for name, row in rows:
        sections.setdefault(name, []).append(row)
    for name, own in sections.items():
        with formatter.section(name):
            formatter.write_dl(own)
