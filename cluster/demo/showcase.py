"""`splitscribe demo`: a whole cluster, three recordings through HTTP, what was heard, and when."""

from __future__ import annotations

import time
from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cluster.common.settings_sources import load_settings
from cluster.demo.samples import SAMPLES, sample_path, sample_text, words_of
from cluster.serve.start.launch import running_cluster

# server-timing names, in the order of the path
STAGES = ("audio", "queue", "encode", "transfer", "decode")


def demo(
    encoders: Annotated[int, typer.Option(help="number of encoder workers", min=1)] = 1,
    decoders: Annotated[int, typer.Option(help="number of decoder workers", min=1)] = 1,
) -> None:
    """Start a cluster on this machine, transcribe three bundled recordings, show the texts, stop.

    Needs no download: the model and the recordings are part of the package.
    """
    from openai import DefaultHttpxClient, OpenAI

    out = Console(highlight=False, soft_wrap=True)
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    settings = load_settings(
        None,
        {
            "model": "demo",
            "log_level": "WARNING",
            "router": {"host": "127.0.0.1", "port": 0},
            "encoder": {"replicas": encoders},
            "decoder": {"replicas": decoders},
        },
        environ={},
    )
    started = time.monotonic()
    with err.status("starting") as status:

        def say(line: str) -> None:
            status.update(line)
            err.print(f"[dim]{time.monotonic() - started:5.1f} s[/]  {line}")

        with running_cluster(settings, say=say) as cluster:
            say(f"ready at {cluster.url}")
            direct = DefaultHttpxClient(trust_env=False)  # through no proxy
            client = OpenAI(base_url=f"{cluster.url}/v1", api_key="none", http_client=direct)
            rows = []
            for name in SAMPLES:
                status.update(f"transcribing {sample_path(name).name}")
                rows.append(_transcribe(client, name, out))
            out.print(_timing_table(rows))
    err.print(
        f"[dim]{time.monotonic() - started:5.1f} s[/]  done; next: splitscribe serve, and open "
        "the page that it names in a browser"
    )


Row = tuple[str, float, float, Mapping[str, float]]  # recording, audio s, wall s, stages in ms


def _transcribe(client: Any, name: str, out: Console) -> Row:
    began = time.monotonic()
    with sample_path(name).open("rb") as file:
        raw = client.audio.transcriptions.with_raw_response.create(
            model="demo", file=file, response_format="verbose_json"
        )
    wall_s = time.monotonic() - began
    answer = raw.parse()
    out.print(f"\n[bold]{sample_path(name).name}[/]  {answer.duration:.1f} s of audio")
    for segment in answer.segments or []:
        out.print(f"  [dim]{segment.start:6.2f} - {segment.end:6.2f}[/]  {segment.text.strip()}")
    out.print(f"  {verdict(sample_text(name), answer.text)}")
    return name, answer.duration, wall_s, parse_server_timing(raw.headers.get("server-timing", ""))


def verdict(spoken: str, heard: str) -> str:
    """Whether the words are the same, else which ones are not."""
    said, got = words_of(spoken), words_of(heard)
    changes = [
        f"{' '.join(got[b0:b1]) or 'nothing'} for {' '.join(said[a0:a1]) or 'nothing'}"
        for tag, a0, a1, b0, b1 in SequenceMatcher(None, said, got, autojunk=False).get_opcodes()
        if tag != "equal"
    ]
    if not changes:
        return f"[green]all {len(said)} words as spoken[/]"
    return f"[yellow]heard otherwise than spoken, of {len(said)} words:[/] {'; '.join(changes)}"


def parse_server_timing(header: str) -> dict[str, float]:
    """Stage -> milliseconds from `audio;dur=12.3, queue;dur=4.5`."""
    stages: dict[str, float] = {}
    for part in header.split(","):
        name, _, rest = part.strip().partition(";")
        for field in rest.split(";"):
            key, _, value = field.strip().partition("=")
            if key == "dur":
                stages[name] = float(value)
    return stages


def _timing_table(rows: list[Row]) -> Table:
    table = Table(title="where the time went, in ms (stages are summed over windows that overlap)")
    table.add_column("recording")
    for stage in (*STAGES, "total wall", "x real time"):
        table.add_column(stage, justify="right")
    for name, audio_s, wall_s, stages in rows:
        cells = [f"{stages.get(stage, 0.0):.1f}" for stage in STAGES]
        table.add_row(name, *cells, f"{1000 * wall_s:.0f}", f"{audio_s / wall_s:.1f}")
    return table
