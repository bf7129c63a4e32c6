"""The real router in front of workers that answer at once: what is left is the router's own cost.

    python -m benchmark.serving.instant [--pools serve|local] [--hold-ms 0]
        [--encoders 1] [--decoders 1] [--routers 1]

Serves until Ctrl-C and prints `ready at URL`, as `splitscribe serve` does. Pools are reached
through the worker-client seam: `serve` are Serve deployments behind the same handles that real
workers have, `local` answers inside of the router's process. With `--hold-ms` a worker holds each
window for so long, one after another, without using a core, as a GPU would. Nothing is encoded or
decoded, and the text is always the short recording's. `bare` is Serve alone: an ingress that reads
the same upload and answers.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import threading
from functools import partial
from typing import Any

from fastapi import FastAPI, Request

from benchmark.shared.command import make_parser
from cluster.demo.samples import sample_text
from cluster.messages import (
    CrossKVHandle,
    DecodeRequest,
    DecodeResult,
    DecodeTimings,
    EncodeReply,
    EncodeRequest,
    EncodeTimings,
    OnToken,
    Role,
    WorkerLoad,
    WorkerStatus,
)
from cluster.metrics import ROUTER_METRICS
from cluster.model.checkpoint import open_checkpoint
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.serve.app import HEALTH_PERIOD_S, HEALTH_TIMEOUT_S, http_front, replica_choice
from cluster.serve.model_parts import served_model
from cluster.serve.placement import Placement
from cluster.serve.replicas.replica_setup import start_replica
from cluster.serve.replicas.router_replica import Router, open_listener, router_app
from cluster.serve.start.launch import running_cluster
from cluster.settings import RouterSettings, Settings
from router.audio.pool import AudioPool
from router.http.admission import MAX_REQUESTS
from router.http.models import ModelRegistry
from router.transcriber import RequestTranscriber

ROLES: tuple[Role, ...] = ("encoder", "decoder")
SPOKEN_S = 5.0  # where the text's last timestamp stands
METADATA_BYTES = 700  # of an exporter's agent, about what NIXL's takes
FIELDS = ("file", "model", "language")


class InstantWorker:
    """Both roles: any window becomes the same handle, any handle the same text."""

    def __init__(self, settings: Settings, hold_s: float = 0.0) -> None:
        tokenizer = WhisperTokenizer.from_checkpoint(open_checkpoint(settings.model, weights=False))
        first = tokenizer.special.timestamp_begin
        last = first + round(SPOKEN_S / tokenizer.timestamp_step_s)
        self._tokens = (first, *tokenizer.encode(" " + sample_text("short")), last)
        self._hold_s = hold_s
        self._device = asyncio.Lock()
        self._held = 0

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        await self._hold()
        handle = CrossKVHandle(
            request_id=request.request_id,
            window=request.window,
            attempt=request.attempt,
            agent="encoder-0123456789abcdef-12345",
            metadata=bytes(METADATA_BYTES),
            layout_hash="0" * 64,
            addresses=(0x7F00_0000_0000,),
            page_bytes=1 << 20,
            frames=1500,
            counter_address=0x7F00_1000_0000,
            generation=1,
            lease="0" * 32,
            remaining_s=10.0,
            signature=bytes(32),
        )
        return EncodeReply(handle, EncodeTimings(0.0, self._hold_s, 1))

    async def decode(self, request: DecodeRequest, on_token: OnToken | None = None) -> DecodeResult:
        await self._hold()
        return DecodeResult(
            request_id=request.request_id,
            window=request.window,
            tokens=self._tokens,
            token_logprobs=(-0.1,) * len(self._tokens),
            avg_logprob=-0.1,
            no_speech_prob=0.0,
            language=request.options.language or "en",
            temperature=0.0,
            finish_reason="stop",
            timings=DecodeTimings(0.0, 0.0, 0, "none", 0.0, self._hold_s, len(self._tokens)),
            compression_ratio=1.0,
        )

    def record_routing_stats(self) -> dict[str, float]:
        """As real workers tell it."""
        return WorkerLoad(self._held, window_s=self._hold_s).as_stats()

    async def status(self) -> tuple[WorkerStatus, ...]:
        """As a worker of both roles tells it."""
        return tuple(
            WorkerStatus("instant", role, True, "instant", "none", "cpu", 1, 1, 0, 0)
            for role in ROLES
        )

    async def _hold(self) -> None:
        if not self._hold_s:
            return
        self._held += 1
        try:
            async with self._device:
                await asyncio.sleep(self._hold_s)
        finally:
            self._held -= 1


class LocalPool(InstantWorker):
    """Both protocols of `router.pools`, without a call to anyone."""

    async def status(self) -> list[WorkerStatus]:  # type: ignore[override]
        return list(await super().status())


class LocalRouter:
    """`cluster.serve.replicas.router_replica.Router` with pools in its own process."""

    async def __init__(self, settings: Settings, build: str, hold_s: float) -> None:  # type: ignore[misc]
        _, recorder = start_replica("router", settings, build, ROUTER_METRICS)
        self._audio = AudioPool(settings.router)
        await self._audio.start()
        checkpoint = open_checkpoint(settings.model, weights=False)
        pool = LocalPool(settings, hold_s)
        transcriber = RequestTranscriber(
            self._audio,
            pool,
            pool,
            WhisperTokenizer.from_checkpoint(checkpoint),
            settings.router,
            recorder,
            dims=checkpoint.dims,
        )
        self._registry = ModelRegistry(
            [served_model(settings, next(iter(settings.by_model())), transcriber)]
        )
        self._app = router_app(self._registry, settings, recorder)
        self._listener = await open_listener(self._app, settings.router)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def __del__(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        await self._audio.close()


class BareIngress:
    """What Serve itself costs for the same upload: read the form, answer."""

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health() -> dict[str, str]:
            return {"status": "ready"}

        @app.post("/v1/audio/transcriptions")
        async def receive(request: Request) -> dict[str, str]:
            async with request.form() as form:
                assert set(FIELDS) <= set(form)
            return {"text": sample_text("short")}

        return app


def build_instant(
    args: argparse.Namespace, settings: Settings, build: str, placement: Placement
) -> Any:
    """The Serve application: as `cluster.serve.app.build_app`, with other workers behind."""
    from ray import serve

    deployment: Any = serve.deployment
    common = {
        "ray_actor_options": {"num_cpus": 0},
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_ongoing_requests": MAX_REQUESTS,
    }
    front = {"name": "router", "num_replicas": args.routers, **common}
    hold_s = args.hold_ms / 1000
    if args.pools == "bare":
        return deployment(serve.ingress()(BareIngress), **front).bind()
    if args.pools == "local":
        return deployment(http_front(LocalRouter, settings), **front).bind(settings, build, hold_s)
    counts = {"encoder": args.encoders, "decoder": args.decoders}
    pools = {
        role: deployment(
            InstantWorker, name=role, num_replicas=n, **replica_choice(), **common
        ).bind(settings, hold_s)
        for role, n in counts.items()
    }
    name = next(iter(settings.by_model()))
    return deployment(http_front(Router, settings), **front).bind(
        settings, build, {name: pools["encoder"]}, {name: pools["decoder"]}
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pools", choices=("serve", "local", "bare"), default="serve")
    parser.add_argument("--hold-ms", type=float, default=0.0, help="of a window, in each worker")
    for role in ("encoders", "decoders", "routers"):
        parser.add_argument(f"--{role}", type=int, default=1)
    parser.add_argument("--listener", choices=("router", "serve"), default="router")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log-level", default="INFO")
    args = parser.parse_args()
    listener = "serve" if args.pools == "bare" else args.listener
    router = RouterSettings(port=args.port, replicas=args.routers, listener=listener)
    settings = Settings(router=router, log_level=args.log_level)
    stop = threading.Event()
    with running_cluster(settings, build=partial(build_instant, args)) as cluster:
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, lambda number, frame: stop.set())
        print(f"ready at {cluster.url}", flush=True)
        stop.wait()


if __name__ == "__main__":
    from benchmark.serving import instant  # so that replicas import its classes by their names

    instant.main()
