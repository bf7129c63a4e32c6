"""Transcribes whole files as bulk work over an application's pools, without a router.

Results equal those of the file endpoint. Any process of the Ray cluster may have an engine.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.common.clock import SYSTEM_CLOCK, Clock
from cluster.common.cores import LEAST_AUDIO_WORKERS, usable_cores
from cluster.common.errors import ConfigurationError, UnsupportedValueError, WorkerGoneError
from cluster.common.metrics import ROUTER_METRICS, Recorder, silent_recorder
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.settings import Settings
from cluster.serve.distribution import check_distribution
from cluster.serve.model_parts import make_transcriber, served_model
from cluster.serve.ray_environment import APP_NAME, deployment_suffixes
from cluster.serve.serve_pool import ServePool, call_worker, pools_of
from router.api.formats import answer_of
from router.api.forms import parse_transcription, requested_model
from router.api.params import Operation, TranscriptionParams
from router.audio.pool import AudioPool
from router.audio.protocol import as_file
from router.http.models import ModelRegistry
from router.interface import RequestContext, StageTimings, TranscriptionResult
from router.pools import DecoderClient, EncoderClient
from router.transcript import TokenLogprob, Transcript

STATE_S = 30.0  # for an application to send its settings
PATIENCE_S = 7 * 24 * 3600.0  # longer than any archive waits
DECODE_S = 1800.0  # CPU time to decode one upload, which may have hours of audio

Pools = Mapping[str, tuple[EncoderClient, DecoderClient]]
OnProgress = Callable[[float, float], None]
Told = tuple[Settings, str]  # an application's settings without secrets, and its build


@dataclass(frozen=True, slots=True)
class BulkResult:
    transcript: Transcript
    timings: StageTimings
    logprobs: tuple[TokenLogprob, ...]
    params: TranscriptionParams

    def body(self) -> dict[str, Any] | str:
        return answer_of(self.transcript, self.params, self.logprobs)


class BulkEngine:
    """Belongs to one event loop."""

    def __init__(self, models: ModelRegistry, clock: Clock = SYSTEM_CLOCK) -> None:
        self.models = models
        self._clock = clock

    @classmethod
    @asynccontextmanager
    async def over_pools(
        cls,
        settings: Settings,
        pools: Pools,
        *,
        recorder: Recorder | None = None,
        clock: Clock = SYSTEM_CLOCK,
        **router: Any,
    ) -> AsyncIterator[BulkEngine]:
        """pools: by the names of `settings.by_model()`. router: changes to its settings.

        Raises ConfigurationError: no checkpoint, or audio workers do not start.
        """
        recorder = recorder or silent_recorder(ROUTER_METRICS)
        patient = {"audio_timeout_s": max(DECODE_S, settings.router.audio_timeout_s)}
        own_router = settings.router.model_copy(update={**patient, **router})
        audio = AudioPool(own_router, speakers=settings.speaker_network(), when_idle=True)
        starting = asyncio.create_task(audio.start())
        models = []
        try:
            for name, own in settings.by_model().items():
                checkpoint = await asyncio.to_thread(open_checkpoint, own.model, weights=False)
                transcriber = make_transcriber(
                    own.model_copy(update={"router": own_router}),
                    checkpoint,
                    audio,
                    *pools[name],
                    recorder,
                    clock=clock,
                    # An archive's audio does not come twice, and would evict other KV.
                    reuses_kv=False,
                )
                models.append(served_model(settings, name, transcriber))
            await starting
            yield cls(ModelRegistry(models, openai_aliases=settings.router.openai_aliases), clock)
        finally:
            await audio.close()

    def params(
        self, fields: Iterable[tuple[str, str]], task: Operation = "transcribe"
    ) -> TranscriptionParams:
        """Raises ModelNotFoundError, UnsupportedValueError, InvalidRequestError."""
        pairs = tuple(fields)
        model = self.models.find(requested_model(pairs))
        params = parse_transcription(pairs, model.languages, task)
        if params.stream:
            raise UnsupportedValueError(
                "bulk requests are not streamed: leave 'stream' out", param="stream"
            )
        model.transcriber.check(params)
        return params

    async def transcribe(
        self,
        upload: Path | bytes,
        params: TranscriptionParams,
        *,
        name: str = "",
        on_progress: OnProgress | None = None,
    ) -> BulkResult:
        """Transcribe one file, however long it has to wait. Cancelling ends it in all workers.

        upload: a file that is not changed meanwhile, or its bytes. name: of the request in logs,
        random if empty. on_progress: called with seconds of audio that are done, and known so far.

        Raises the file endpoint's SplitscribeErrors, OverloadedError only after repeated failures
        of workers.
        """
        name = name or f"bulk-{uuid.uuid4().hex}"
        logprobs: list[TokenLogprob] = []
        context = RequestContext.unlimited(name, PATIENCE_S, self._clock)
        context.priority = "bulk"
        context.on_progress = on_progress
        if params.logprobs:
            context.on_update = lambda update: logprobs.extend(update.logprobs)
        transcriber = self.models.find(params.model).transcriber
        async with AsyncExitStack() as files:
            if not isinstance(upload, Path):
                upload = await files.enter_async_context(as_file(upload))
            result: TranscriptionResult = await transcriber.transcribe(upload, params, context)
        return BulkResult(result.transcript, result.timings, tuple(logprobs), params)


@asynccontextmanager
async def engine_of_application(told: Told | None = None) -> AsyncIterator[BulkEngine]:
    """Open an engine over the Ray cluster of this process, without limits on files.

    Raises ConfigurationError: there is no application, or it is of another build.
    """
    settings, build = told or await application_settings()
    check_distribution(build)
    pools = await serve_pools(settings)
    async with BulkEngine.over_pools(
        settings,
        pools,
        max_upload_bytes=2**50,
        max_audio_s=PATIENCE_S,
        min_audio_s=0.0,
        # Without uploads to receive, this process can feed more of them than a router.
        audio_workers=max(LEAST_AUDIO_WORKERS, usable_cores() // 2),
    ) as engine:
        yield engine


async def application_settings() -> Told:
    """Raises ConfigurationError: there is no application, or it does not answer."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        router: Any = await asyncio.to_thread(serve.get_app_handle, APP_NAME)
        async with asyncio.timeout(STATE_S):
            told: Told = await call_worker(router.shared_settings.remote())
    except RayServeException as error:
        raise ConfigurationError(
            f"the Ray cluster runs no application called '{APP_NAME}': {error}"
        ) from error
    except (TimeoutError, WorkerGoneError) as error:
        raise ConfigurationError(
            f"no router of '{APP_NAME}' has sent its settings: {str(error) or 'no answer'}"
        ) from error
    return told


async def serve_pools(settings: Settings) -> dict[str, tuple[ServePool, ServePool]]:
    from ray import serve

    deployments = (await asyncio.to_thread(serve.status)).applications[APP_NAME].deployments
    suffixes = deployment_suffixes(settings.models)
    handles: dict[str, dict[str, Any]] = {"encoder": {}, "decoder": {}}
    for model, suffix in zip(settings.by_model(), suffixes, strict=True):
        for role, of_model in handles.items():
            colocated = f"worker{suffix}"
            name = colocated if colocated in deployments else f"{role}{suffix}"
            of_model[model] = serve.get_deployment_handle(name, APP_NAME)
    return pools_of(handles["encoder"], handles["decoder"])
