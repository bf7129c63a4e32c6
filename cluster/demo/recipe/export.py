"""Write the averaged weights as a checkpoint in the Hugging Face layout, 16 bit.

    python -m cluster.demo.recipe.export --work DIR [--out cluster/demo/checkpoint]

Reads a training state and the tokenizer; writes config, weights, tokenizer, generation and feature
settings, as a published Whisper has them. No id is written down here: all come from the tokenizer.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.demo.recipe.text_tokens import LANGUAGE_CODES, TextTokens
from cluster.demo.recipe.whisper import ALIGNMENT_HEADS, Shape

CHECKPOINT = Path(__file__).parents[1] / "checkpoint"
MAX_BYTES = 12_000_000
# Marks that no speaker says: kept out of a transcript, as Whisper does.
_SINGLE = '"#()*+/:;<=>@[\\]^_`{|}~「」『』'
_GROUP_TEXT = "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪"
_GROUPS = tuple(_GROUP_TEXT.split())
_MUSIC = "♩♪♫♬♭♮♯"


def non_speech_ids(tokens: TextTokens) -> list[int]:
    """Ids of marks that are no speech, by Whisper's rule over this tokenizer."""
    found = {tokens.encode(" -")[0], tokens.encode(" '")[0]}
    for mark in (*_SINGLE, *_GROUPS, *_MUSIC):
        for ids in (tokens.encode(mark), tokens.encode(" " + mark)):
            if len(ids) == 1 or mark in _MUSIC:
                found.add(ids[0])
    return sorted(found)


def model_config(shape: Shape, tokens: TextTokens) -> dict[str, Any]:
    """`config.json`."""
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "activation_function": "gelu",
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "dropout": 0.0,
        "d_model": shape.d_model,
        "encoder_layers": shape.encoder_layers,
        "encoder_attention_heads": shape.n_heads,
        "encoder_ffn_dim": 4 * shape.d_model,
        "encoder_layerdrop": 0.0,
        "decoder_layers": shape.decoder_layers,
        "decoder_attention_heads": shape.n_heads,
        "decoder_ffn_dim": 4 * shape.d_model,
        "decoder_layerdrop": 0.0,
        "decoder_start_token_id": tokens.sot,
        "bos_token_id": tokens.eot,
        "eos_token_id": tokens.eot,
        "pad_token_id": tokens.eot,
        "init_std": 0.02,
        "max_source_positions": shape.n_audio_ctx,
        "max_target_positions": shape.n_text_ctx,
        "num_hidden_layers": shape.encoder_layers,
        "num_mel_bins": shape.n_mels,
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
        "median_filter_width": 7,
    }


def generation_config(tokens: TextTokens) -> dict[str, Any]:
    """`generation_config.json`, with the fields of a published multilingual Whisper."""
    controls = [
        tokens.sot,
        tokens.translate,
        tokens.transcribe,
        tokens.special("<|startoflm|>"),
        tokens.sot_prev,
        tokens.no_speech,
    ]
    return {
        "alignment_heads": [list(pair) for pair in ALIGNMENT_HEADS],
        "begin_suppress_tokens": [tokens.encode(" ")[0], tokens.eot],
        "bos_token_id": tokens.eot,
        "decoder_start_token_id": tokens.sot,
        "eos_token_id": tokens.eot,
        "forced_decoder_ids": None,
        "is_multilingual": True,
        "lang_to_id": {
            f"<|{code}|>": token
            for code, token in zip(LANGUAGE_CODES, tokens.languages, strict=True)
        },
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "no_timestamps_token_id": tokens.no_timestamps,
        "pad_token_id": tokens.eot,
        "prev_sot_token_id": tokens.sot_prev,
        "return_timestamps": False,
        "suppress_tokens": sorted({*non_speech_ids(tokens), *controls}),
        "task_to_id": {"transcribe": tokens.transcribe, "translate": tokens.translate},
    }


PREPROCESSOR = {
    "chunk_length": 30,
    "dither": 0.0,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 80,
    "hop_length": 160,
    "n_fft": 400,
    "n_samples": 480_000,
    "nb_max_frames": 3000,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
    "sampling_rate": 16_000,
}


def export(work: Path, out: Path) -> Path:
    """Write the checkpoint; returns the weights' path.

    Raises ValueError if the weights pass `MAX_BYTES`.
    """
    state = torch.load(work / "state.pt", weights_only=True)
    tokens = TextTokens(work / "tokenizer")
    shape = Shape(**state["shape"])
    weights: dict[str, Tensor] = {
        name: value.to(torch.float16).contiguous() for name, value in state["average"].items()
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / "model.safetensors"
    part = path.with_suffix(".part")
    save_file(weights, part, metadata={"format": "pt"})
    if part.stat().st_size > MAX_BYTES:
        raise ValueError(f"{part} has {part.stat().st_size} bytes, more than {MAX_BYTES}")
    part.chmod(0o644)  # the library writes for its owner alone
    part.replace(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(work / "tokenizer" / name, out / name)
    for name, content in (
        ("config.json", model_config(shape, tokens)),
        ("generation_config.json", generation_config(tokens)),
        ("preprocessor_config.json", PREPROCESSOR),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    return path


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()
    path = export(arguments.work, arguments.out)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
