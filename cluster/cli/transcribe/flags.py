"""The flags of `splitscribe transcribe`: those of the API's fields and its own.

The value of a field's flag is text in the API's form, or None where it is not given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from cluster.cli.plain_help import PlainCommand, PlainTyper
from cluster.common.messages import Task
from router.api.kinds import (
    AudioUrl,
    Boolean,
    Choice,
    Integer,
    ListOf,
    Number,
    RequestField,
    Threshold,
    Times,
)
from router.api.params import LADDER
from router.api.request_fields import FIELDS, SECTIONS
from router.words import APPENDED, PREPENDED

SWITCH = "True|False"  # the metavar of switches, by which they are found
DEFAULT_JOBS = 4
FALLBACK_STEP = f"{LADDER[1] - LADDER[0]:g}"  # between the temperatures of fallback

FIXED = {  # options of openai/whisper that only take its defaults here
    "suppress_tokens": "-1",
    "prepend_punctuations": PREPENDED,
    "append_punctuations": APPENDED,
}


class Switch(StrEnum):
    true = "True"
    false = "False"

    def __bool__(self) -> bool:
        return self is Switch.true


def optional_text(text: str) -> str | None:
    return None if text.lower() == "none" else text


def optional_int(text: str) -> int | None:
    try:
        return None if optional_text(text) is None else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no whole number") from None


@dataclass(frozen=True, slots=True)
class Flag:
    """kind: a type that typer knows. more: further arguments of `typer.Option`."""

    name: str
    kind: Any
    help: str
    default: Any = None
    more: Mapping[str, Any] = field(default_factory=dict)
    short: tuple[str, ...] = ()

    def parameter(self, panel: str) -> Parameter:
        names = (f"--{self.name.replace('_', '-')}", *self.short)
        option = typer.Option(*names, help=self.help, rich_help_panel=panel, **self.more)
        annotation = cast(Any, Annotated)[self.kind, option]
        return Parameter(
            self.name, Parameter.KEYWORD_ONLY, default=self.default, annotation=annotation
        )


NUMBER = {"metavar": "NUMBER", "parser": optional_text}
NUMBER_OF_ONE_OR_MORE = {"min": 1}
THRESHOLD = {"metavar": "NUMBER|None"}
ONE_OF_TWO = {"case_sensitive": False, "metavar": SWITCH}


def _switch(name: str, text: str, default: Switch | None) -> Flag:
    return Flag(name, Switch | None, text, default, ONE_OF_TWO)


def _limit(name: str, text: str) -> Flag:
    return Flag(name, int | None, text, None, {"metavar": "INT", "parser": optional_int})


# By panel, in the order of the help. Flags of the API's fields come before these in a panel.
OWN_FLAGS: dict[str, tuple[Flag, ...]] = {
    "Where it runs": (
        Flag(
            "model",
            str | None,
            "a short name such as small, a Hub id, a folder, or 'demo', the bundled toy "
            "[default: turbo; a server's own]",
        ),
        Flag("model_dir", Path | None, "folder of downloaded models, in place of the Hub's cache"),
        Flag("device", str, "auto, cpu or cuda", "auto"),
        Flag("threads", int, "number of CPU threads; 0: one for each core", 0, {"min": 0}),
        _switch("fp16", "False: compute in float32; otherwise the device's usual type", None),
        Flag(
            "jobs",
            int,
            "number of files that are transcribed at the same time",
            DEFAULT_JOBS,
            {"min": 1, "max": 128},  # each has four open files
        ),
        Flag(
            "server",
            str | None,
            "URL of a running server; without it the work is done in this process",
        ),
        Flag("api_key", str | None, "API key for the server", more={"envvar": "OPENAI_API_KEY"}),
    ),
    "Input": (
        Flag("raw", bool, "files are 16 kHz mono int16 samples without a header", False),
        Flag(
            "live",
            bool,
            "transcribe live: from the microphone, or from a FILE or '-' that still grows",
            False,
        ),
    ),
    "Language and context": (Flag("task", Task, "translate: into English", "transcribe"),),
    "Output": (
        Flag("output_dir", Path, "folder for the results", Path("."), short=("-o",)),
        Flag(
            "output_format",
            Literal["txt", "vtt", "srt", "tsv", "json", "all"],
            "one format, or all five",
            "all",
            short=("-f",),
        ),
        _switch("verbose", "also print the segments", Switch.true),
        _switch("word_timestamps", "find when each word is spoken", Switch.false),
        _switch("highlight_words", "underline each word as it is spoken (srt, vtt)", Switch.false),
        _limit("max_line_width", "characters in a line of a subtitle"),
        _limit("max_line_count", "lines in a subtitle, with --max-line-width"),
        _limit("max_words_per_line", "words in a subtitle"),
        *(
            Flag(name, str, f"always {FIXED[name]}", FIXED[name])
            for name in ("prepend_punctuations", "append_punctuations")
        ),
    ),
    "Decoding": (Flag("suppress_tokens", str, f"always {FIXED['suppress_tokens']}", "-1"),),
    "Temperature fallback": (
        Flag(
            "temperature_increment_on_fallback",
            str,
            "step by which the temperature rises from 0 to 1 after a text fails; None: do not try "
            "again",
            FALLBACK_STEP,
            THRESHOLD,
        ),
    ),
}


def parameters() -> Iterator[Parameter]:
    files = typer.Argument(
        help="audio or video files, folders, patterns like '*.wav', URLs, or - for standard input",
        metavar="FILE",
        show_default=False,
    )
    annotation = Annotated[list[str] | None, files]
    yield Parameter("files", Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    yield from flag_parameters(OWN_FLAGS)


def flag_parameters(own: Mapping[str, Sequence[Flag]]) -> Iterator[Parameter]:
    """Parameters for the flags of the API's fields and for `own`, panel by panel."""
    for panel in dict.fromkeys((*own, *SECTIONS)):
        for one in SECTIONS.get(panel, ()):
            if one.flag:
                yield field_flag(one).parameter(panel)
        for flag in own.get(panel, ()):
            yield flag.parameter(panel)


def parameter_name(of: RequestField) -> str:
    return of.flag.removeprefix("--").replace("-", "_")


def field_flag(of: RequestField) -> Flag:
    kind: Any = str
    more: dict[str, Any] = {}
    match of.kind:
        case Boolean():
            kind, more = Switch, ONE_OF_TWO
        case Choice(choices):
            kind = cast(Any, Literal)[choices]
        case Threshold():
            more = THRESHOLD
        case Number() | Integer():
            more = NUMBER
        case Times():
            more = {"metavar": "S,S,..."}
        case ListOf(item):
            more = {"metavar": "FILE,..." if isinstance(item, AudioUrl) else "NAME,..."}
    return Flag(parameter_name(of), kind | None, _help(of), more=more)


def _help(of: RequestField) -> str:
    text = re.sub("`([^`]+)`", _spelled, of.description)
    if of.default in (None, ()):
        return text
    default = f"{of.default:g}" if isinstance(of.default, float) else of.default
    return f"{text} [default: {default}]"


def _spelled(quoted: re.Match[str]) -> str:
    name, equals, value = quoted[1].partition("=")
    if name in FIELDS and FIELDS[name].flag:
        return FIELDS[name].flag + equals.replace("=", " ") + value
    return "None" if name == "none" else quoted[1]


class WhisperCommand(PlainCommand):
    """Accept underscores in flags, and switches with or without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name for param in self.params for name in param.opts if name.startswith("--")}
        switches = {name for param in self.params if param.metavar == SWITCH for name in param.opts}
        return super().parse_args(ctx, normalised(args, options, switches))


def whisper_command(function: Callable[..., None]) -> Any:
    app = PlainTyper()
    app.command(cls=WhisperCommand)(function)
    return typer.main.get_command(app)


def normalised(
    args: Sequence[str], options: Collection[str], switches: Collection[str]
) -> list[str]:
    """Write flags with dashes, switches with a value: `--word_timestamps` as
    `--word-timestamps=True`.
    """
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
