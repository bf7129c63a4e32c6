"""Shapes of a Whisper checkpoint, read from its Hugging Face `config.json`. No torch.

Nothing is assumed: heads, widths, layers, mel bins and vocabulary all come from the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ModelDims:
    """Dimensions under openai/whisper's names.

    n_audio_ctx: encoder positions in a window (1500, after the stride-2 convolution).
    n_text_ctx: decoder positions (448).
    """

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
        """Mel frames in a window: 3000, two for each encoder position."""
        return 2 * self.n_audio_ctx

    @property
    def text_head_dim(self) -> int:
        return self.n_text_state // self.n_text_head

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelDims:
        """Read a `config.json` mapping.

        Raises:
            CheckpointError: a key is missing, or the sizes contradict each other.
        """
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
        for heads, state in (
            (dims.n_audio_head, dims.n_audio_state),
            (dims.n_text_head, dims.n_text_state),
        ):
            if state % heads:
                raise CheckpointError(
                    f"config.json: d_model {state} does not divide by {heads} heads"
                )
        return dims
