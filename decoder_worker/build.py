"""Builds an engine's parts so that they fit each other, or says at start why they do not."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.common.errors import ConfigurationError
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.layout import KVLayout
from cluster.common.kv.pool import PagePool
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.device import resolve_device, resolve_dtype, step_threads
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import DecoderSettings
from decoder_worker.backends import choose_attention, load_decoders
from decoder_worker.model_runner import ModelRunner, self_kv_layout
from decoder_worker.scheduling.scheduler import Scheduler
from decoder_worker.states import StatesProjection


@dataclass(frozen=True, slots=True)
class EngineParts:
    """cross_pool: where KV lies. projection: where encoder states travel, what makes KV of them."""

    device: str
    runner: ModelRunner
    scheduler: Scheduler
    cross_pool: PagePool
    self_pool: PagePool
    projection: StatesProjection | None
    steps_ahead: int


def build_parts(
    checkpoint: Checkpoint,
    tokenizer: WhisperTokenizer,
    importer: KVImporter,
    kv_pool: PagePool | None,
    settings: DecoderSettings,
    page_tokens: int,
) -> EngineParts:
    """Resolve "auto", allocate the self-attention pool, load the weights, capture graphs.

    kv_pool: as in `DecoderEngine`.

    Raises:
        ConfigurationError: importer, checkpoint and settings do not fit each other.
        CheckpointError: the weights cannot be loaded.
    """
    cross_pool = kv_pool or importer.pool
    device = cross_pool.device.type
    if settings.device != "auto" and resolve_device(settings.device) != device:
        raise ConfigurationError(
            f"the decoder's device is {settings.device!r}, but its KV pool is on {device!r}"
        )
    _check_layout(checkpoint, cross_pool)
    layout = self_kv_layout(checkpoint, resolve_dtype(settings.dtype, device), page_tokens)
    # One page more, which the runner takes for the rows that fill up a batch.
    self_pool = PagePool(layout, settings.max_batch * layout.pages_per_window + 1, device)
    pools = (self_pool.tensor, cross_pool.tensor)
    packed, int8 = cross_pool.packs, settings.dtype == "int8"
    threads = step_threads(settings.threads)
    attentions = choose_attention(settings.attention, *pools, threads, packed=packed)
    decoders = load_decoders(checkpoint, attentions, *pools, int8=int8, packed=packed)
    runner = ModelRunner(checkpoint, tokenizer, cross_pool, self_pool, settings.max_batch, decoders)
    scheduler = Scheduler(
        cross_pool,
        self_pool,
        layout.pages_per_window,
        settings.max_batch,
        settings.bulk_share,
        landing_pool=None if kv_pool is None else importer.pool,
    )
    projection = None
    if kv_pool is not None:
        projection = StatesProjection(checkpoint, importer.pool, kv_pool)
    steps_ahead = int(device != "cpu") if settings.steps_ahead is None else settings.steps_ahead
    return EngineParts(device, runner, scheduler, cross_pool, self_pool, projection, steps_ahead)


def _check_layout(checkpoint: Checkpoint, pool: PagePool) -> None:
    layout, dims = pool.layout, checkpoint.dims
    if not isinstance(layout, KVLayout):
        raise ConfigurationError("a decoder needs a pool of cross-attention KV, also for states")
    found = (layout.n_layer, layout.n_head, layout.head_dim, layout.n_frames)
    expected = (dims.n_text_layer, dims.n_text_head, dims.text_head_dim, dims.n_audio_ctx)
    if found != expected:
        raise ConfigurationError(
            f"the KV pool holds (layers, heads, head size, frames) {found}, "
            f"the checkpoint has {expected}"
        )
    if pool.n_pages < layout.pages_per_window:
        raise ConfigurationError(
            f"the KV pool has {pool.n_pages} pages, one window takes "
            f"{layout.pages_per_window}: raise decoder.kv_windows"
        )
