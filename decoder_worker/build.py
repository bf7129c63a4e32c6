"""Builds an engine's parts so that they fit each other, or says at start why they do not."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import ConfigurationError
from cluster.kv.layout import KVLayout
from cluster.kv.payloads import HandoffImporter
from cluster.kv.pool import PagePool
from cluster.model.checkpoint import Checkpoint
from cluster.model.device import resolve_device, resolve_dtype, step_threads
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.settings import DecoderSettings
from decoder_worker.backends import choose_attention, load_decoders
from decoder_worker.model_runner import ModelRunner, self_kv_layout
from decoder_worker.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineParts:
    device: str
    runner: ModelRunner
    scheduler: Scheduler
    self_pool: PagePool
    steps_ahead: int


def build_parts(
    checkpoint: Checkpoint,
    tokenizer: WhisperTokenizer,
    importer: HandoffImporter,
    settings: DecoderSettings,
    page_tokens: int,
) -> EngineParts:
    """Resolve "auto", allocate the self-attention pool, load the weights, capture graphs.

    Raises:
        ConfigurationError: importer, checkpoint and settings do not fit each other.
        CheckpointError: the weights cannot be loaded.
    """
    cross_pool = importer.pool
    device = cross_pool.device.type
    if settings.device != "auto" and resolve_device(settings.device) != device:
        raise ConfigurationError(
            f"the decoder's device is {settings.device!r}, but its KV pool is on {device!r}"
        )
    _check_layout(checkpoint, importer)
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
    )
    if (landing := importer.landing_pool) is not None:
        runner.states_projection.load(landing.tensor.dtype)
    steps_ahead = int(device != "cpu") if settings.steps_ahead is None else settings.steps_ahead
    return EngineParts(device, runner, scheduler, self_pool, steps_ahead)


def _check_layout(checkpoint: Checkpoint, importer: HandoffImporter) -> None:
    layout, dims = importer.layout, checkpoint.dims
    if not isinstance(layout, KVLayout):
        raise ConfigurationError("a decoder needs a pool of cross-attention KV, also for states")
    found = (layout.n_layer, layout.n_head, layout.head_dim, layout.n_frames)
    expected = (dims.n_text_layer, dims.n_text_head, dims.text_head_dim, dims.n_audio_ctx)
    if found != expected:
        raise ConfigurationError(
            f"the KV pool holds (layers, heads, head size, frames) {found}, "
            f"the checkpoint has {expected}"
        )
    if importer.pool.n_pages < layout.pages_per_window:
        raise ConfigurationError(
            f"the KV pool has {importer.pool.n_pages} pages, one window takes "
            f"{layout.pages_per_window}: raise decoder.kv_windows"
        )
