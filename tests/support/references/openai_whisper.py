"""openai-whisper with our checkpoints, whose vocabulary and kind it would else not know."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numba
import numpy as np
import tiktoken
import torch
import whisper
from safetensors.torch import load_file
from whisper.tokenizer import Tokenizer

from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.model.text.vocabulary import read_vocabulary

# The package's attribute of that name is the function.
TRANSCRIBE = sys.modules["whisper.transcribe"]
DECODING = sys.modules["whisper.decoding"]
TIMING = importlib.import_module("whisper.timing")

# As it is, but on one thread: numba's would be torch's as well, and it compiles for seconds.
TIMING.dtw_cpu = numba.njit(TIMING.dtw_cpu.py_func)

GPT2_PIECES = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LAYER_NAMES = {
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "final_layer_norm": "mlp_ln",
    "self_attn": "attn",
    "encoder_attn": "cross_attn",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "out",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
}
OUTER_NAMES = {
    "embed_positions.weight": "positional_embedding",
    "embed_tokens": "token_embedding",
    "layers": "blocks",
}
LAST_NORM = {"encoder": "ln_post", "decoder": "ln"}


class SmallWhisper(whisper.model.Whisper):
    languages: tuple[str, ...] = ()
    multilingual = True

    @property
    def is_multilingual(self) -> bool:
        return self.multilingual

    @property
    def num_languages(self) -> int:
        return len(self.languages)


@functools.lru_cache(maxsize=2)
def openai_model(folder: Path) -> SmallWhisper:
    checkpoint = open_checkpoint(str(folder))
    tokenizer = tokenizer_of(folder)
    dimensions = whisper.model.ModelDimensions
    sizes = {one.name: getattr(checkpoint.dims, one.name) for one in fields(dimensions)}
    model = SmallWhisper(dimensions(**sizes))
    tensors = {
        _openai_name(name): tensor.float()
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if "proj_out" not in name
    }
    model.load_state_dict(tensors)
    model.multilingual = tokenizer.is_multilingual
    model.languages = tuple(tokenizer.special.languages)
    heads = torch.zeros(model.dims.n_text_layer, model.dims.n_text_head, dtype=torch.bool)
    for layer, head in checkpoint.generation_config["alignment_heads"]:
        heads[layer, head] = True
    model.register_buffer("alignment_heads", heads.to_sparse(), persistent=False)
    return model.eval()


def log_mel(model: Any, audio: np.ndarray[Any, Any]) -> torch.Tensor:
    """One window's features by the reference, padded to 30 s: [n_mels, 3000]."""
    mel = whisper.log_mel_spectrogram(audio, model.dims.n_mels, padding=480_000)
    return whisper.pad_or_trim(mel, whisper.audio.N_FRAMES)


@torch.inference_mode()
def cross_kv(model: Any, mel: torch.Tensor) -> torch.Tensor:
    """The reference's own projections: [n_frames, layer, 2, head, head_dim]."""
    states = model.encoder(mel[None])[0]
    layers = [block.cross_attn for block in model.decoder.blocks]
    kv = torch.stack([torch.stack((a.key(states), a.value(states)), dim=1) for a in layers], dim=1)
    return kv.unflatten(-1, (layers[0].n_head, -1))


@functools.lru_cache(maxsize=2)
def tokenizer_of(folder: Path) -> WhisperTokenizer:
    return WhisperTokenizer.from_checkpoint(open_checkpoint(str(folder)))


def reference_options(folder: Path) -> dict[str, Any]:
    """The checkpoint's suppressed tokens: which symbols are one token depends on the vocabulary."""
    return {"fp16": False, "suppress_tokens": list(tokenizer_of(folder).suppress_tokens)}


@contextmanager
def openai_vocabulary(folder: Path) -> Iterator[None]:
    encoding = _encoding(folder)
    languages = tokenizer_of(folder).special.languages

    def get_tokenizer(
        multilingual: bool,
        *,
        num_languages: int = 99,
        language: str | None = None,
        task: str | None = None,
    ) -> Tokenizer:
        if not multilingual:
            return Tokenizer(encoding=encoding, num_languages=num_languages)
        return Tokenizer(
            encoding=encoding,
            num_languages=len(languages),
            language=language or "en",
            task=task or "transcribe",
        )

    with (
        patch.object(TRANSCRIBE, "get_tokenizer", get_tokenizer),
        patch.object(DECODING, "get_tokenizer", get_tokenizer),
    ):
        yield


@functools.lru_cache(maxsize=2)
def _encoding(folder: Path) -> tiktoken.Encoding:
    """The folder's byte-level BPE, whose ids are the ranks of its merges."""
    vocabulary = read_vocabulary(folder)
    special = dict(vocabulary.added)
    if "<|nocaptions|>" in special:  # its name until large-v3
        special["<|nospeech|>"] = special.pop("<|nocaptions|>")
    return tiktoken.Encoding(
        name=str(folder),
        pat_str=GPT2_PIECES,
        mergeable_ranks={
            piece: index
            for index, piece in vocabulary.pieces.items()
            if index < special["<|endoftext|>"]
        },
        special_tokens=special,
    )


def _openai_name(name: str) -> str:
    """`model.decoder.layers.0.fc1.bias` is `decoder.blocks.0.mlp.0.bias` there."""
    side, rest = name.removeprefix("model.").split(".", 1)
    if rest.startswith("layer_norm."):
        return f"{side}.{rest.replace('layer_norm', LAST_NORM[side])}"
    for ours, theirs in (OUTER_NAMES | LAYER_NAMES).items():
        rest = ".".join(theirs if part == ours else part for part in rest.split("."))
    return f"{side}.{rest.replace('embed_positions.weight', 'positional_embedding')}"
