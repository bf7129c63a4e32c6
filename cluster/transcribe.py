"""`splitscribe transcribe`: files in, txt and json out, in this process or through a server.

The json has openai/whisper's keys (text, language, segments). A file that fails is told in one
line and the others go on; the exit status says whether all went well.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.errors import InvalidRequestError, SplitscribeError
from cluster.settings import load_settings


@dataclass(frozen=True, slots=True)
class Job:
    """What the command line asked for."""

    files: tuple[Path, ...]
    model: str
    language: str | None
    prompt: str | None
    temperature: float
    output_dir: Path
    formats: tuple[str, ...]
    verbose: bool
    device: str
    threads: int
    server: str | None
    api_key: str | None


NO_DEADLINE_S = 7 * 24 * 3600.0

Answer = dict[str, Any]  # verbose_json
OnProgress = Callable[[float, float], None]  # seconds of audio done, seconds known
Transcriber = Callable[[Path, OnProgress], Awaitable[Answer]]


def transcribe_files(job: Job, out: Console, err: Console) -> None:
    """Transcribe every file of the job and write its results.

    Raises:
        SplitscribeError: nothing could be done at all, or some files failed (told before).
    """
    job.output_dir.mkdir(parents=True, exist_ok=True)
    failed = asyncio.run(_run(job, out, err))
    if failed:
        raise InvalidRequestError(f"{failed} of {len(job.files)} files failed")


async def _run(job: Job, out: Console, err: Console) -> int:
    failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    opened = _through_server(job) if job.server else _in_process(job)
    async with opened as transcribe_one:
        with Progress(*columns, TimeElapsedColumn(), console=err) as progress:
            for file in job.files:
                task = progress.add_task(file.name, total=None, state="")

                def on_progress(done_s: float, known_s: float, task: Any = task) -> None:
                    progress.update(
                        task, completed=done_s, total=known_s, state=f"{done_s:.0f}/{known_s:.0f} s"
                    )

                try:
                    answer = await transcribe_one(file, on_progress)
                except (SplitscribeError, OSError) as error:
                    failed += 1
                    progress.update(task, total=1, completed=0, state="failed")
                    err.print(f"splitscribe: {file}: {error}", style="red", markup=False)
                    continue
                progress.update(task, total=1, completed=1, state="done")
                _show(job, answer, out)
                _write(job, file, answer)
    return failed


def _show(job: Job, answer: Answer, out: Console) -> None:
    if not job.verbose:
        return
    for segment in answer["segments"]:
        times = f"[{_clock(segment['start'])} --> {_clock(segment['end'])}]"
        out.print(f"{times} {segment['text']}", markup=False)


def _write(job: Job, file: Path, answer: Answer) -> None:
    for name in job.formats:
        target = job.output_dir / f"{file.stem}.{name}"
        if name == "json":
            target.write_text(json.dumps(answer, ensure_ascii=False, indent=1) + "\n")
        else:
            lines = [segment["text"].strip() for segment in answer["segments"]]
            target.write_text("".join(f"{line}\n" for line in lines))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes):02d}:{rest:06.3f}"


@asynccontextmanager
async def _in_process(job: Job) -> AsyncIterator[Transcriber]:
    from cluster.app import local_pipeline
    from cluster.model.languages import language_code
    from router.formats import render
    from router.schemas import TranscriptionParams
    from router.seams import RequestContext

    language = language_code(job.language) if job.language else None
    if job.language and language is None:
        raise InvalidRequestError(f"{job.language!r} is no language that is known here")
    params = TranscriptionParams(
        model=job.model, language=language, prompt=job.prompt, temperature=job.temperature
    )
    role = {"device": job.device, "threads": job.threads}
    settings = load_settings(None, {"model": job.model, "encoder": role, "decoder": role})
    async with local_pipeline(settings) as pipeline:

        async def transcribe_one(file: Path, on_progress: OnProgress) -> Answer:
            await asyncio.to_thread(file.stat)  # an OSError with its name, before any work
            context = RequestContext(
                request_id=file.name,
                ledger=_Unlimited(),
                min_deadline_s=NO_DEADLINE_S,
                deadline_factor=1.0,
                max_deadline_s=NO_DEADLINE_S,
                on_progress=on_progress,
            )
            result = await pipeline.transcribe(file, params, context)
            answer: Answer = json.loads(render(result.transcript, "verbose_json").body)
            return answer

        yield transcribe_one


class _Unlimited:
    """An AudioLedger for one person's own files."""

    def expect(self, audio_s: float) -> None:
        """Any length is welcome."""

    found = expect


@asynccontextmanager
async def _through_server(job: Job) -> AsyncIterator[Transcriber]:
    import openai

    base = (job.server or "").rstrip("/")
    client = openai.AsyncOpenAI(
        base_url=base if base.endswith("/v1") else f"{base}/v1", api_key=job.api_key or "none"
    )

    async def transcribe_one(file: Path, on_progress: OnProgress) -> Answer:
        options: dict[str, Any] = {"temperature": job.temperature}
        if job.language:
            options["language"] = job.language
        if job.prompt:
            options["prompt"] = job.prompt
        try:
            with file.open("rb") as audio:
                answer = await client.audio.transcriptions.create(
                    model=job.model if job.model != "demo" else "whisper-1",
                    file=audio,
                    response_format="verbose_json",
                    **options,
                )
        except openai.APIStatusError as error:
            raise InvalidRequestError(error.message) from error
        except openai.APIConnectionError as error:
            raise InvalidRequestError(f"no server answers at {base}: {error}") from error
        fields: Answer = answer.model_dump()
        return fields

    async with client:
        yield transcribe_one
