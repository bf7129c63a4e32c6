"""The shapes of all tensors of a Whisper checkpoint, by its Hugging Face `config.json`. No torch.

Each role loads only its own. Names are without the prefix `model.` that some files have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.common.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ModelDims:
    """Sizes under openai/whisper's names. n_audio_ctx is 1500, after the second convolution."""

    n_mels: int
    n_vocab: int
    n_audio_ctx: int
    n_audio_state: int
    n_audio_head: int
    n_audio_layer: int
    n_audio_ffn: int
    n_text_ctx: int
    n_text_state: int
    n_text_head: int
    n_text_layer: int
    n_text_ffn: int

    @property
    def n_mel_frames(self) -> int:
        return 2 * self.n_audio_ctx

    @property
    def text_head_dim(self) -> int:
        return self.n_text_state // self.n_text_head

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelDims:
        """Raises CheckpointError if a key is missing or the heads do not divide the width."""
        try:
            dims = cls(
                n_mels=int(config["num_mel_bins"]),
                n_vocab=int(config["vocab_size"]),
                n_audio_ctx=int(config["max_source_positions"]),
                n_audio_state=int(config["d_model"]),
                n_audio_head=int(config["encoder_attention_heads"]),
                n_audio_layer=int(config["encoder_layers"]),
                n_audio_ffn=int(config["encoder_ffn_dim"]),
                n_text_ctx=int(config["max_target_positions"]),
                n_text_state=int(config["d_model"]),
                n_text_head=int(config["decoder_attention_heads"]),
                n_text_layer=int(config["decoder_layers"]),
                n_text_ffn=int(config["decoder_ffn_dim"]),
            )
        except KeyError as missing:
            raise CheckpointError(
                f"config.json is not a Whisper configuration: {missing} is missing"
            ) from missing
        for heads in (dims.n_audio_head, dims.n_text_head):
            if dims.n_audio_state % heads:
                raise CheckpointError(
                    f"config.json: d_model {dims.n_audio_state} does not divide by {heads} heads"
                )
        return dims


Shape = tuple[int, ...]

EMBED_TOKENS = "decoder.embed_tokens.weight"
PROJ_OUT = "proj_out.weight"  # tied to EMBED_TOKENS in every published checkpoint


def encoder_shapes(dims: ModelDims) -> dict[str, Shape]:
    d = dims.n_audio_state
    shapes: dict[str, Shape] = {
        "encoder.conv1.weight": (d, dims.n_mels, 3),
        "encoder.conv1.bias": (d,),
        "encoder.conv2.weight": (d, d, 3),
        "encoder.conv2.bias": (d,),
        "encoder.embed_positions.weight": (dims.n_audio_ctx, d),
    }
    for layer in range(dims.n_audio_layer):
        prefix = f"encoder.layers.{layer}"
        shapes |= _attention(f"{prefix}.self_attn", d)
        shapes |= _layer_norm(f"{prefix}.self_attn_layer_norm", d)
        shapes |= _mlp(prefix, d, dims.n_audio_ffn)
    return shapes | _layer_norm("encoder.layer_norm", d)


def cross_kv_shapes(dims: ModelDims) -> dict[str, Shape]:
    d = dims.n_text_state
    shapes: dict[str, Shape] = {}
    for layer in range(dims.n_text_layer):
        prefix = f"decoder.layers.{layer}.encoder_attn"
        shapes[f"{prefix}.k_proj.weight"] = (d, dims.n_audio_state)
        shapes[f"{prefix}.v_proj.weight"] = (d, dims.n_audio_state)
        shapes[f"{prefix}.v_proj.bias"] = (d,)
    return shapes


def decoder_shapes(dims: ModelDims) -> dict[str, Shape]:
    d = dims.n_text_state
    shapes: dict[str, Shape] = {
        EMBED_TOKENS: (dims.n_vocab, d),
        "decoder.embed_positions.weight": (dims.n_text_ctx, d),
    }
    for layer in range(dims.n_text_layer):
        prefix = f"decoder.layers.{layer}"
        shapes |= _attention(f"{prefix}.self_attn", d)
        shapes |= _layer_norm(f"{prefix}.self_attn_layer_norm", d)
        for name in ("q_proj", "out_proj"):
            shapes |= _linear(f"{prefix}.encoder_attn.{name}", d, d)
        shapes |= _layer_norm(f"{prefix}.encoder_attn_layer_norm", d)
        shapes |= _mlp(prefix, d, dims.n_text_ffn)
    return shapes | _layer_norm("decoder.layer_norm", d)


def _attention(prefix: str, d: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{prefix}.k_proj.weight": (d, d)}  # Whisper's K has no bias
    for name in ("q_proj", "v_proj", "out_proj"):
        shapes |= _linear(f"{prefix}.{name}", d, d)
    return shapes


def _mlp(prefix: str, d: int, ffn: int) -> dict[str, Shape]:
    return (
        _layer_norm(f"{prefix}.final_layer_norm", d)
        | _linear(f"{prefix}.fc1", ffn, d)
        | _linear(f"{prefix}.fc2", d, ffn)
    )


def _linear(prefix: str, n_out: int, n_in: int) -> dict[str, Shape]:
    return {f"{prefix}.weight": (n_out, n_in), f"{prefix}.bias": (n_out,)}


def _layer_norm(prefix: str, d: int) -> dict[str, Shape]:
    return {f"{prefix}.weight": (d,), f"{prefix}.bias": (d,)}
