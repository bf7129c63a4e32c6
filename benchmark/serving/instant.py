"""The real router in front of workers that answer at once: what is left is the router's own cost.

    python -m benchmark.serving.instant [--bare]

Serves until Ctrl-C and prints `ready at URL`, as `splitscribe serve` does. The workers are Serve
deployments behind the same handles that real ones have. Nothing is encoded or decoded, and the text
is always the short recording's. With `--bare` it is Serve alone: an ingress that reads the same
upload and answers.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from fastapi import FastAPI, Request

from benchmark.shared.command import make_parser
from benchmark.shared.own_server import FRONT, pool, serve_until_signal, with_router
from cluster.common.messages import (
    ROLES,
    CrossKVHandle,
    DecodeRequest,
    DecodeResult,
    DecodeTimings,
    EncodeReply,
    EncodeRequest,
    EncodeTimings,
    OnToken,
    WorkerLoad,
    WorkerStatus,
)
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import RouterSettings, Settings
from cluster.demo.samples import sample_text
from cluster.serve.placement import Placement
from router.http.admission import MAX_REQUESTS

SPOKEN_S = 5.0  # where the text's last timestamp stands
METADATA_BYTES = 700  # of an exporter's agent, about what NIXL's takes
ROOMY = WorkerLoad(capacity=256)
FIELDS = ("file", "model", "language")


class InstantWorker:
    """Both roles: any window becomes the same handle, any handle the same text."""

    def __init__(self, settings: Settings) -> None:
        tokenizer = WhisperTokenizer.from_checkpoint(open_checkpoint(settings.model, weights=False))
        first = tokenizer.special.timestamp_begin
        last = first + round(SPOKEN_S / tokenizer.timestamp_step_s)
        self._tokens = (first, *tokenizer.encode(" " + sample_text("short")), last)

    async def encode(self, request: EncodeRequest) -> EncodeReply:
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
        return EncodeReply(handle, EncodeTimings(0.0, 0.0, 1), load=ROOMY)

    async def decode(self, request: DecodeRequest, on_token: OnToken | None = None) -> DecodeResult:
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
            timings=DecodeTimings(0.0, 0.0, 0, "none", 0.0, 0.0, len(self._tokens)),
            compression_ratio=1.0,
            load=ROOMY,
        )

    async def status(self) -> tuple[WorkerStatus, ...]:
        """As a worker of both roles tells it."""
        return tuple(
            WorkerStatus("instant", role, True, "instant", "none", "cpu", 1, 1, 0, 0)
            for role in ROLES
        )


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
    if args.bare:
        from ray import serve

        deployment: Any = serve.deployment
        return deployment(serve.ingress()(BareIngress), **FRONT).bind()
    pools = {role: pool(InstantWorker, role, 1, MAX_REQUESTS).bind(settings) for role in ROLES}
    return with_router(settings, build, pools)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--bare", action="store_true", help="Serve alone, without a router")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    listener: Any = "serve" if args.bare else "router"
    router = RouterSettings(port=args.port, listener=listener)
    settings = Settings(router=router, log_level="WARNING")
    serve_until_signal(settings, partial(build_instant, args))


if __name__ == "__main__":
    from benchmark.serving import instant  # so that replicas import its classes by their names

    instant.main()
