"""Random Whisper checkpoints in Hugging Face's layout, for tests: no download, no training.

The published families' true widths, heads, mel bins, vocabularies and special ids, few layers.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cluster.common.model.dims import (
    EMBED_TOKENS,
    ModelDims,
    Shape,
    cross_kv_shapes,
    decoder_shapes,
    encoder_shapes,
)
from cluster.common.model.text.languages import LANGUAGES

N_TIMESTAMPS = 1501  # 0.00 to 30.00 s
_MERGES = ("t h", "Ġ t", "Ġt h", "i n", "in g", "Ġ a", "a n", "an d", "e r", "Ġ -", "Ġ '")


@dataclass(frozen=True)
class ModelShape:
    d_model: int
    n_head: int
    encoder_layers: int
    decoder_layers: int
    n_mels: int = 80
    n_vocab: int = 51_865
    n_languages: int = 99
    multilingual: bool = True
    no_speech: str = "<|nocaptions|>"


# "micro" is for tests of everything but the model: built in milliseconds.
SHAPES: dict[str, ModelShape] = {
    "micro": ModelShape(32, 2, 2, 2, n_vocab=2_000, n_languages=4),
    "tiny": ModelShape(384, 6, 2, 2),
    "tiny.en": ModelShape(384, 6, 2, 2, n_vocab=51_864, multilingual=False),
    "base": ModelShape(512, 8, 2, 2),
    "small": ModelShape(768, 12, 1, 2),
    "medium": ModelShape(1024, 16, 1, 1),
    "large-v2": ModelShape(1280, 20, 1, 1),
    "large-v3": ModelShape(
        1280, 20, 1, 1, n_mels=128, n_vocab=51_866, n_languages=100, no_speech="<|nospeech|>"
    ),
    "large-v3-turbo": ModelShape(
        1280, 20, 1, 4, n_mels=128, n_vocab=51_866, n_languages=100, no_speech="<|nospeech|>"
    ),
    "distil": ModelShape(
        1280, 20, 1, 2, n_mels=128, n_vocab=51_866, n_languages=100, no_speech="<|nospeech|>"
    ),
}


@functools.cache
def cached_checkpoint(shape: str = "micro") -> Path:
    """Shared by all tests of this process: do not change it. Wide ones are stored in bfloat16."""
    dtype = "bfloat16" if SHAPES[shape].d_model >= 1024 else "float32"
    return make_checkpoint(_cache_root() / shape, shape, dtype=dtype)


@functools.cache
def _cache_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="splitscribe-checkpoints-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def make_checkpoint(
    folder: Path,
    shape: str | ModelShape = "micro",
    *,
    dtype: str = "float32",
    sharded: bool = False,
    prefix: str = "model.",
    seed: int = 0,
    device: str = "cpu",
    **changes: Any,
) -> Path:
    """Write a random checkpoint into `folder`; `changes` replace fields of its shape.

    dtype: of the stored weights. prefix: both namings exist. device: which draws the numbers.
    """
    chosen = replace(SHAPES[shape] if isinstance(shape, str) else shape, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(chosen)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(chosen))
    _write_json(folder / "preprocessor_config.json", _preprocessor_config(chosen))
    _write_json(folder / "tokenizer.json", tokenizer_definition(chosen))
    tensors = random_tensors(ModelDims.from_config(config), seed, device, getattr(torch, dtype))
    stored = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    if sharded:
        _save_shards(folder, stored)
    else:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def special_tokens(shape: ModelShape) -> dict[str, int]:
    contents = ["<|endoftext|>", "<|startoftranscript|>"]
    contents += [f"<|{code}|>" for code in list(LANGUAGES)[: shape.n_languages]]
    contents += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"]
    contents += [shape.no_speech, "<|notimestamps|>"]
    contents += [f"<|{0.02 * n:.2f}|>" for n in range(N_TIMESTAMPS)]
    first = shape.n_vocab - len(contents)
    return {content: first + n for n, content in enumerate(contents)}


def model_config(shape: ModelShape) -> dict[str, Any]:
    special = special_tokens(shape)
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "activation_function": "gelu",
        "d_model": shape.d_model,
        "encoder_layers": shape.encoder_layers,
        "decoder_layers": shape.decoder_layers,
        "encoder_attention_heads": shape.n_head,
        "decoder_attention_heads": shape.n_head,
        "encoder_ffn_dim": 4 * shape.d_model,
        "decoder_ffn_dim": 4 * shape.d_model,
        "num_mel_bins": shape.n_mels,
        "vocab_size": shape.n_vocab,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
        "bos_token_id": special["<|endoftext|>"],
        "eos_token_id": special["<|endoftext|>"],
        "pad_token_id": special["<|endoftext|>"],
        "decoder_start_token_id": special["<|startoftranscript|>"],
    }


def generation_config(shape: ModelShape) -> dict[str, Any]:
    special = special_tokens(shape)
    pieces = _pieces()
    never = ("<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>")
    config: dict[str, Any] = {
        "bos_token_id": special["<|endoftext|>"],
        "eos_token_id": special["<|endoftext|>"],
        "pad_token_id": special["<|endoftext|>"],
        "decoder_start_token_id": special["<|startoftranscript|>"],
        "no_timestamps_token_id": special["<|notimestamps|>"],
        "prev_sot_token_id": special["<|startofprev|>"],
        "begin_suppress_tokens": [pieces["Ġ"], special["<|endoftext|>"]],
        "suppress_tokens": sorted(
            [pieces[symbol] for symbol in "#()*[]"]
            + [special[content] for content in (*never, "<|startofprev|>", shape.no_speech)]
        ),
        "is_multilingual": shape.multilingual,
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "return_timestamps": False,
        "alignment_heads": [[shape.decoder_layers - 1, head] for head in range(2)],
    }
    if shape.multilingual:
        codes = list(LANGUAGES)[: shape.n_languages]
        config["lang_to_id"] = {f"<|{code}|>": special[f"<|{code}|>"] for code in codes}
        config["task_to_id"] = {
            task: special[f"<|{task}|>"] for task in ("transcribe", "translate")
        }
    return config


def tokenizer_definition(shape: ModelShape) -> dict[str, Any]:
    """A tokenizer.json: 256 bytes, a few merges, then words that no merge makes."""
    special = special_tokens(shape)
    vocab = _pieces()
    for index in range(len(vocab), special["<|endoftext|>"]):
        vocab[f"Ġw{index}"] = index
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": content, "special": "." not in content, **flags}
            for content, index in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [merge.split(" ") for merge in _MERGES],
        },
    }


def random_tensors(
    dims: ModelDims, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Drawn in float32, at a scale where every layer, position and frame matters to the logits."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = encoder_shapes(dims) | cross_kv_shapes(dims) | decoder_shapes(dims)
    return {
        name: _random(name, shape, generator).to("cpu", dtype) for name, shape in shapes.items()
    }


def _random(name: str, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if name.endswith("layer_norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith("bias") or "embed_positions" in name:
        return 0.1 * noise
    if name == EMBED_TOKENS:
        return noise * (2 / math.sqrt(shape[1]))
    fan_in = math.prod(shape[1:])
    return noise / math.sqrt(fan_in)


def _pieces() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = [chr(byte) for byte in printable]
    characters += [chr(0x100 + n) for n in range(256 - len(printable))]
    merged = [merge.replace(" ", "") for merge in _MERGES]
    return {piece: index for index, piece in enumerate([*characters, *merged])}


def _save_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    weight_map = {}
    for number, half in enumerate(halves, start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(half, file)
    index = {"metadata": {}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _preprocessor_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "chunk_length": 30,
        "feature_size": shape.n_mels,
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 480_000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
        "sampling_rate": 16_000,
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")
