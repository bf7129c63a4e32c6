"""The command `splitscribe demo`, which transcribes the bundled recordings by a cluster."""

from __future__ import annotations

import time
from difflib import SequenceMatcher
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.common.settings_sources import load_settings
from cluster.demo.samples import SAMPLES, sample_path, sample_text, words_of
from cluster.serve.start.launch import running_cluster


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
            direct = DefaultHttpxClient(trust_env=False)  # without the proxies of the environment
            client = OpenAI(base_url=f"{cluster.url}/v1", api_key="none", http_client=direct)
            for name in SAMPLES:
                status.update(f"transcribing {sample_path(name).name}")
                _transcribe(client, name, out)
    err.print(
        f"[dim]{time.monotonic() - started:5.1f} s[/]  done; next: splitscribe serve, and open "
        "the page that it names in a browser"
    )


def _transcribe(client: Any, name: str, out: Console) -> None:
    began = time.monotonic()
    with sample_path(name).open("rb") as file:
        answer = client.audio.transcriptions.create(
            model="demo", file=file, response_format="verbose_json"
        )
    wall_s = time.monotonic() - began
    out.print(
        f"\n[bold]{sample_path(name).name}[/]  {answer.duration:.1f} s of audio in {wall_s:.2f} s, "
        f"{answer.duration / wall_s:.0f} times as fast as it was spoken"
    )
    for segment in answer.segments or []:
        out.print(f"  [dim]{segment.start:6.2f} - {segment.end:6.2f}[/]  {segment.text.strip()}")
    out.print(f"  {verdict(sample_text(name), answer.text)}")


def verdict(spoken: str, heard: str) -> str:
    said, got = words_of(spoken), words_of(heard)
    changes = [
        f"{' '.join(got[b0:b1]) or 'nothing'} for {' '.join(said[a0:a1]) or 'nothing'}"
        for tag, a0, a1, b0, b1 in SequenceMatcher(None, said, got, autojunk=False).get_opcodes()
        if tag != "equal"
    ]
    if not changes:
        return f"[green]all {len(said)} words as spoken[/]"
    return f"[yellow]heard otherwise than spoken, of {len(said)} words:[/] {'; '.join(changes)}"
