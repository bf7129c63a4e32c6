"""Sizes an engine's batch and pools, builds its parts, and refuses at start what does not fit."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass

from cluster.common.errors import ConfigurationError
from cluster.common.kv.connect import LANDING_WINDOWS, served_kv_layout, served_layout
from cluster.common.kv.cross_kv import WINDOWS_AT_ONCE
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.layout import ITEM_BYTES, window_bytes
from cluster.common.kv.pool import RESERVE_BYTES, GpuBudget, PagePool, pool_windows
from cluster.common.messages import CrossKVHandle, DecodeOptions, DecodeRequest
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.device import resolve_device, resolve_dtype, step_threads
from cluster.common.model.dims import ModelDims, cross_kv_shapes, decoder_shapes
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import DecoderSettings, Settings
from decoder_worker.backends import choose_attention, load_decoders
from decoder_worker.model_runner import ModelRunner, self_kv_layout
from decoder_worker.prompts import PromptBuilder
from decoder_worker.sampling.search import Row
from decoder_worker.scheduling.scheduler import ALONE, TOGETHER, Scheduler
from decoder_worker.scheduling.sequence import DecodeSequence
from decoder_worker.states import StatesProjection

CPU_ROWS = 16
MOST_GPU_ROWS = 64  # more gain next to nothing
GPU_ROWS = (MOST_GPU_ROWS, 48, 32, 24, 16, 12, 8, 4, 2, 1)  # as many as fit
POOL_BATCHES = 2  # one runs while the KV of the next is read
_LOGIT_COPIES = 6  # float32 logits, their masks and sorted copies
_WORKSPACE_BYTES = 1 << 30  # attention kernels' plans, 16 MB of each bucket, and split results

STEPS = 2  # of the warm-up: single ones, then as many at once
WINDOWS = 2  # whose pages the warm-up writes to: pools hand out their first pages first


@dataclass(frozen=True, slots=True)
class EngineParts:
    """projection: None unless encoder states travel. steps_ahead: as the function of that name."""

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
    """Resolve "auto", allocate the self-attention pool, load the weights, capture graphs."""
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
        landing_pool=None if kv_pool is None else importer.pool,
        step_order=ALONE if device == "cpu" else TOGETHER,
    )
    projection = None
    if kv_pool is not None:
        projection = StatesProjection(checkpoint, importer.pool, kv_pool)
    ahead = steps_ahead(device)
    return EngineParts(device, runner, scheduler, cross_pool, self_pool, projection, ahead)


def steps_ahead(device: str) -> int:
    """Decode steps launched before the last results are read; a CPU's launch waits for them."""
    return 0 if device == "cpu" else 1


def _check_layout(checkpoint: Checkpoint, pool: PagePool) -> None:
    layout, dims = pool.layout, checkpoint.dims
    if layout.payload != "cross_kv":
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


def warm_up(runner: ModelRunner, prompts: PromptBuilder, cross: PagePool, own: PagePool) -> None:
    """Decode silence, so that a CPU's first window is as fast as later ones.

    First calls choose kernels and touch new memory. All pages of both pools must be free. Call on
    the thread that decodes, before the first sequence.
    """
    n_cross, n_own = cross.layout.pages_per_window, own.layout.pages_per_window
    for pool, n_pages in ((cross, n_cross), (own, n_own)):
        pool.tensor[: min(pool.n_pages, WINDOWS * n_pages)].zero_()
    cross_pages, own_pages = cross.allocate(n_cross), own.allocate(n_own)
    assert cross_pages is not None
    assert own_pages is not None
    try:
        sequence = _silence(prompts, cross.layout.n_frames, cross_pages, own_pages)
        runner.collect(runner.prefill([sequence]))
        for _ in range(STEPS):
            sequence.live[0].tokens.append(prompts.eot)
            runner.restore(sequence)
            runner.collect(runner.decode([sequence]))
        sequence.live[0].tokens.append(prompts.eot)
        runner.restore(sequence)
        if (most := runner.most_steps([sequence])) > 1:
            runner.decode_several([sequence], most)
    finally:
        cross.release(cross_pages)
        own.release(own_pages)


def _silence(
    prompts: PromptBuilder, n_frames: int, cross_pages: tuple[int, ...], own_pages: tuple[int, ...]
) -> DecodeSequence:
    handle = CrossKVHandle("", 0, 0, "", b"", "", (), 0, n_frames, 0, 0, "", 0.0)
    options = DecodeOptions()
    sequence = DecodeSequence(
        DecodeRequest("", 0, 0, handle, options, 0.0),
        Future(),
        arrived_s=0.0,
        deadline_s=0.0,
        n_new_max=2 * STEPS + 2,
        language=prompts.any_language,
        rows=[Row(0, own_pages)],
        cross_pages=cross_pages,
    )
    sequence.begin_attempt(prompts.eot)
    sequence.prompt = prompts.prompt(options, prompts.any_language)
    return sequence


def auto_batch(device: str) -> int:
    return CPU_ROWS if device == "cpu" else MOST_GPU_ROWS


def sized(
    settings: Settings, checkpoint: Checkpoint, device: str, budget: GpuBudget | None
) -> Settings:
    """Fill in the sizes of batch and pool, or raise ConfigurationError. budget: None on a CPU."""
    role, needs = settings.decoder, {}
    window = window_bytes(served_kv_layout(checkpoint, settings, device))
    rows = role.max_batch or auto_batch(device)
    if budget is not None:
        dtype = resolve_dtype(role.dtype, device)
        needs["weights"] = weight_bytes(checkpoint.dims, dtype)
        if settings.handoff == "encoder_states":
            needs["encoder states"] = landing_bytes(settings, checkpoint, device)
        if not role.max_batch:
            room = budget.free_bytes - RESERVE_BYTES - sum(needs.values())
            rows = _rows_that_fit(checkpoint.dims, dtype, room, window, role.kv_windows)
        needs[f"{rows} rows"] = working_bytes(checkpoint.dims, dtype, rows)
    n_windows = pool_windows(
        "decoder.kv_windows",
        role.kv_windows,
        POOL_BATCHES * rows,
        window,
        budget,
        needs,
    )
    decoder = role.model_copy(update={"kv_windows": n_windows, "max_batch": rows})
    return settings.model_copy(update={"decoder": decoder})


def _rows_that_fit(dims: ModelDims, dtype: str, room: int, window: int, n_windows: int) -> int:
    """The most rows for which `room` also holds `n_windows`, or a window each if that is 0."""
    for rows in GPU_ROWS:
        if working_bytes(dims, dtype, rows) + (n_windows or rows) * window <= room:
            return rows
    return GPU_ROWS[-1]


def weight_bytes(dims: ModelDims, dtype: str) -> int:
    return sum(math.prod(shape) for shape in decoder_shapes(dims).values()) * ITEM_BYTES[dtype]


def landing_bytes(settings: Settings, checkpoint: Checkpoint, device: str) -> int:
    layout, dims = served_layout(checkpoint, settings, device), checkpoint.dims
    weights = sum(math.prod(shape) for shape in cross_kv_shapes(dims).values())
    results = WINDOWS_AT_ONCE * dims.n_audio_ctx * 2 * dims.n_text_layer * dims.n_text_state
    return LANDING_WINDOWS * window_bytes(layout) + (weights + results) * ITEM_BYTES[layout.dtype]


def working_bytes(dims: ModelDims, dtype: str, max_batch: int) -> int:
    self_kv = 2 * dims.n_text_layer * dims.n_text_ctx * dims.n_text_state * ITEM_BYTES[dtype]
    logits = _LOGIT_COPIES * dims.n_vocab * 4
    return max_batch * (self_kv + logits) + _WORKSPACE_BYTES
