"""Load on any server with OpenAI's transcription endpoint: the figures of `vllm bench serve`.

    python -m benchmark.serving.load --max-concurrency 8                    # closed loop
    python -m benchmark.serving.load --request-rate 20 --goodput e2el:1000  # Poisson arrivals
    python -m benchmark.serving.load --base-url http://gpu:8000 --folder clips --save-result

In a closed loop a request arrives when a slot is free; with a rate it arrives when its time has
come, and what it then waits in this client counts as client queueing. No two requests have the same
audio: each gets noise of at most one step of 16 bits, so that no cache of a server answers for its
engine; a second run against the same server needs another `--seed` for that. Warm-up requests are
dropped. Before all, the client's own ceiling is measured against a server that answers at once
(`benchmark.shared.bare_server`); a run that comes near it says nothing of the server. Where
recordings have references, the word error rate stands beside the speed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmark.serving.load_metrics import (
    NAMES,
    Sent,
    details,
    parse_goodput,
    report_lines,
    summary,
)
from benchmark.shared import command
from benchmark.shared.bare_server import bare_server
from benchmark.shared.clips import Clip, add_clip_flags, clips_of
from benchmark.shared.openai_client import ENDPOINT, Client, Outcome, Upload, form_fields
from benchmark.shared.speech.wav import wav_bytes
from benchmark.shared.word_errors import count_all, interval, total
from cluster.messages import SAMPLE_RATE

BACKEND = "openai-audio"
INF = float("inf")
CEILING_REQUESTS = 300
CEILING_IN_FLIGHT = 32
NEAR_CEILING = 0.5
SHOWN_ERRORS = 10

MakeUpload = Callable[[int], Upload]  # by the number of the request


def make_parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", "--url", help="default: http://HOST:PORT")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=8000)
    server.add_argument("--endpoint", default=ENDPOINT)
    server.add_argument("--backend", default=BACKEND, choices=[BACKEND])
    server.add_argument("--model", help="default: the first one that the server lists")
    server.add_argument("--api-key")
    server.add_argument("--timeout", type=float, default=600.0, help="seconds of one request")

    audio = parser.add_argument_group("requests; by default the recordings of this package")
    add_clip_flags(audio)
    audio.add_argument("--num-prompts", type=int, help="requests; default: 5 per slot, at least 64")
    audio.add_argument("--asr-min-audio-len-sec", type=float, default=0.0)
    audio.add_argument("--asr-max-audio-len-sec", type=float, default=INF)
    audio.add_argument("--language", default="en", help="'' lets the server detect it")
    audio.add_argument("--no-stream", action="store_true", help="ask for JSON: no TTFT")
    audio.add_argument("--extra-body", type=json.loads, default={}, help="form fields, as JSON")

    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--max-concurrency", type=int, help="requests in flight at most")
    traffic.add_argument("--request-rate", type=float, default=INF, help="arrivals/s; inf: no wait")
    traffic.add_argument("--burstiness", type=float, default=1.0, help="gamma's shape; 1: Poisson")
    traffic.add_argument("--seed", type=int, default=0, help="of arrivals and noise")
    traffic.add_argument("--num-warmups", type=int, help="dropped; default: one per slot, 4 to 32")
    traffic.add_argument("--no-ceiling", action="store_true", help="do not measure this client")

    report = parser.add_argument_group("report")
    report.add_argument("--goodput", nargs="+", metavar="KEY:MS", help="ttft, tpot, e2el")
    report.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el")
    report.add_argument("--metric-percentiles", default="99")
    report.add_argument("--save-result", action="store_true", help="write vLLM's JSON")
    report.add_argument("--save-detailed", action="store_true", help="with every request in it")
    report.add_argument("--result-dir", type=Path, default=Path())
    report.add_argument("--result-filename")
    report.add_argument("--label", help="default: the backend")
    report.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")
    return parser


@dataclass(frozen=True, slots=True)
class Speech:
    """A clip in memory: int16 [n_samples] at 16 kHz."""

    clip: Clip
    pcm: NDArray[np.int16]

    @property
    def seconds(self) -> float:
        return len(self.pcm) / SAMPLE_RATE


class UniqueUploads:
    """Request `n` is clip n modulo their number, with noise that no other request has."""

    def __init__(self, speech: Sequence[Speech], fields: dict[str, str], n: int, seed: int) -> None:
        self._speech = speech
        self._fields = fields
        longest = max(len(one.pcm) for one in speech)
        rng = np.random.default_rng(seed)
        self._noise = rng.integers(-1, 2, longest + n, dtype=np.int16)  # request n begins at n

    def __call__(self, number: int) -> Upload:
        pcm = self._speech[number % len(self._speech)].pcm
        # Clipped first: a step beyond 16 bits would wrap around.
        noisy = np.clip(pcm, -32_767, 32_766) + self._noise[number : number + len(pcm)]
        return Upload.of(wav_bytes(noisy), "audio.wav", self._fields)


def arrival_offsets(n: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which each of `n` requests arrives.

    Gaps are gamma distributed with mean 1/rate; scaled so that all arrive in n/rate seconds, and
    seeds differ in their pattern and not in their rate.
    """
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), n).tolist()
    offsets = list(accumulate(gaps))
    return [offset * (n / rate) / offsets[-1] for offset in offsets]


async def send_load(
    client: Client,
    make_upload: MakeUpload,
    numbers: range,
    max_concurrency: int | None,
    offsets: Sequence[float] | None = None,
) -> list[Outcome]:
    """Send the requests `numbers`, in a closed loop or at `offsets`."""
    slots = asyncio.Semaphore(max_concurrency or len(numbers))
    tasks: list[asyncio.Task[Outcome]] = []

    async def one(number: int, due: float) -> Outcome:
        if offsets is not None:
            await slots.acquire()
        try:
            outcome = await client.send(make_upload(number))
            outcome.queue = outcome.start - due
            return outcome
        finally:
            slots.release()

    began = time.perf_counter()
    for index, number in enumerate(numbers):
        if offsets is None:
            await slots.acquire()
            due = time.perf_counter()
        else:
            due = began + offsets[index]
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(number, due)))
    return await asyncio.gather(*tasks)


async def ceiling(make_upload: MakeUpload, n: int, in_flight: int) -> float:
    """Requests/s of this client where the server costs nothing."""
    with bare_server() as server:
        async with Client(server.url) as client:
            await send_load(client, make_upload, range(min(n, 2 * in_flight)), in_flight)
            began = time.perf_counter()
            outcomes = await send_load(client, make_upload, range(n), in_flight)
            wall_s = time.perf_counter() - began
    failed = [outcome for outcome in outcomes if outcome.failure]
    if failed:
        raise SystemExit(f"the client failed against the bare server: {failed[0].error}")
    return n / wall_s


def load_speech(args: argparse.Namespace) -> list[Speech]:
    speech = [Speech(clip, clip.pcm()) for clip in clips_of(args)]
    low, high = args.asr_min_audio_len_sec, args.asr_max_audio_len_sec
    kept = [one for one in speech if low <= one.seconds <= high]
    if not kept:
        raise SystemExit(f"no recording is between {low:g} and {high:g} s long")
    return kept


def word_error_rate(
    speech: Sequence[Speech], outcomes: Sequence[Outcome], language: str
) -> dict[str, Any]:
    """Of the whole run, failed requests included; empty where a recording has no reference."""
    references = [one.clip.reference for one in speech]
    if None in references:
        return {}
    said = [references[n % len(speech)] or "" for n in range(len(outcomes))]
    errors = count_all(said, [None if o.failure else o.text for o in outcomes], language)
    low, high = interval(errors)
    return {"wer": total(errors).wer, "wer_interval": [low, high]}


async def run(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole benchmark: its figures, and one value a request of what it sent."""
    speech = load_speech(args)
    slots = args.max_concurrency or CEILING_IN_FLIGHT
    n = args.num_prompts or max(64, 5 * slots)
    n_warmups = min(32, max(4, slots)) if args.num_warmups is None else args.num_warmups
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    endpoint = base_url if "/audio/" in base_url else base_url.removesuffix("/v1") + args.endpoint
    slo_ms = parse_goodput(args.goodput)
    percentiles = [float(text) for text in args.metric_percentiles.split(",")]
    offsets = None
    if args.request_rate != INF:
        offsets = arrival_offsets(n, args.request_rate, args.burstiness, args.seed)

    async with Client(endpoint, args.api_key, args.timeout) as client:
        model = args.model or await client.first_model()
        stream = {} if args.no_stream else {"stream": True}
        fields = form_fields(model, args.language, stream | args.extra_body)
        make_upload = UniqueUploads(speech, fields, n + n_warmups + CEILING_REQUESTS, args.seed)
        top = None if args.no_ceiling else await ceiling(make_upload, CEILING_REQUESTS, slots)
        if top is not None:
            print(f"ceiling: this client reaches {top:.0f} requests/s, {slots} in flight")
        print(f"{len(speech)} recordings, {n_warmups} requests to warm up, {n} that count")
        await send_load(client, make_upload, range(n, n + n_warmups), slots)
        began, cpu_began = time.perf_counter(), time.process_time()
        outcomes = await send_load(client, make_upload, range(n), args.max_concurrency, offsets)
        duration_s = time.perf_counter() - began
        cpu_s = time.process_time() - cpu_began
    sent = [Sent(speech[i % len(speech)].seconds, outcome) for i, outcome in enumerate(outcomes)]
    result: dict[str, Any] = {
        "backend": args.backend,
        "endpoint_type": args.backend,
        "label": args.label,
        "model_id": model,
        "num_prompts": n,
        "request_rate": "inf" if args.request_rate == INF else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **dict(pair.partition("=")[::2] for pair in args.metadata),
        **summary(sent, duration_s, slo_ms, percentiles),
        "client_ceiling": top,
        "client_cpu_cores": cpu_s / duration_s,
        **word_error_rate(speech, outcomes, args.language),
    }
    return result, details(sent)


def result_file(args: argparse.Namespace, model: str, date: str) -> Path:
    """vLLM's name: label, rate, concurrency, model, time."""
    if args.result_filename:
        return Path(args.result_dir / args.result_filename)
    concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    label, name = args.label or args.backend, model.rpartition("/")[2]
    return Path(args.result_dir / f"{label}-{args.request_rate}qps{concurrency}-{name}-{date}.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Ends with status 1 when no request succeeded."""
    args = make_parser().parse_args(argv)
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    result, per_request = asyncio.run(run(args))
    errors = [error for error in per_request["errors"] if error]
    for error in errors[:SHOWN_ERRORS]:
        print(f"failed: {error}")
    blocks = [*args.percentile_metrics.split(","), "client_queue_time"]
    if result["request_rate"] != "inf":
        blocks.append("e2el_including_client_queue")
    print("\n".join(report_lines(result, [key for key in blocks if key in NAMES])))
    top = result["client_ceiling"]
    if top and result["request_throughput"] > NEAR_CEILING * top:
        print("The client was near its own ceiling: this says little of the server.")
    if args.save_result:
        file = result_file(args, result["model_id"], date)
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = {"date": date, **result, **(per_request if args.save_detailed else {})}
        file.write_text(json.dumps(whole))
        print(f"written: {file}")
    command.print_result("serve", result)
    return 0 if result["completed"] else 1


if __name__ == "__main__":
    sys.exit(main())
