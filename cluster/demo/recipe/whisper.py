"""Whisper's architecture for training: parameters are named as in the Hugging Face layout.

Differs from a serving model in two ways. The encoder runs on a slice of the 30 s frame, at any
offset of its positional table, so that short windows train every position at their own cost. And
the decoder returns the attention of its guided heads, which training ties to the true word times.
The heads that only training uses (`AuxiliaryHeads`) are a module of their own and never exported.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# (decoder layer, head): those that training guides to where the next token is heard
ALIGNMENT_HEADS = ((1, 0), (2, 0), (2, 1))
KeyValues = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of the model; heads of 64 as in every published Whisper."""

    vocab_size: int
    d_model: int = 192
    n_heads: int = 3
    encoder_layers: int = 4
    decoder_layers: int = 3
    n_mels: int = 80
    n_audio_ctx: int = 1500
    n_text_ctx: int = 448

    def as_dict(self) -> dict[str, int]:
        """For a checkpoint's header."""
        return asdict(self)


def sinusoids(length: int, channels: int) -> Tensor:
    """Whisper's positional table, float32 (length, channels)."""
    scale = math.log(10_000) / (channels // 2 - 1)
    inverse = torch.exp(-scale * torch.arange(channels // 2))
    angles = torch.arange(length)[:, None] * inverse[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Attention(nn.Module):
    """Multi-head attention, Whisper's biases: none on the keys."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def split(self, x: Tensor) -> Tensor:
        """(batch, n, d) to (batch, heads, n, head_dim)."""
        batch, n, d_model = x.shape
        return x.view(batch, n, self.n_heads, d_model // self.n_heads).transpose(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        """The way back, through the output projection."""
        out: Tensor = self.out_proj(x.transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        """Self-attention over x, (batch, n, d)."""
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        if causal:
            return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        # For a window's frames the plain product is faster than the fused kernel, above all back.
        with torch.autocast("cpu", enabled=False):
            scores = (q * (1 / math.sqrt(q.shape[-1]))) @ k.transpose(-1, -2)
            mixed = scores.softmax(dim=-1) @ v
        return self.merge(mixed)

    def cross(self, x: Tensor, k: Tensor, v: Tensor, weights: bool) -> tuple[Tensor, Tensor | None]:
        """Attention over projected audio; with `weights` also float32 (batch, heads, n, n_audio).

        The weights come as log-probabilities: what training needs them for is their logarithm.
        """
        q = self.split(self.q_proj(x))
        if not weights:
            return self.merge(F.scaled_dot_product_attention(q, k, v)), None
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
        log_weights = scores.log_softmax(dim=-1)
        return self.merge(log_weights.exp().to(v.dtype) @ v), log_weights


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and MLP."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.self_attn = Attention(d_model, n_heads)
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.fc1 = nn.Linear(d_model, 4 * d_model)
        self.fc2 = nn.Linear(4 * d_model, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, dropout: float) -> Tensor:
        """(batch, n, d) to the same."""
        attended = self.self_attn(self.self_attn_layer_norm(x), causal=False)
        x = x + F.dropout(attended, dropout, self.training)
        hidden = self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return x + F.dropout(hidden, dropout, self.training)


class DecoderLayer(nn.Module):
    """Pre-norm causal self-attention, cross-attention and MLP."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.self_attn = Attention(d_model, n_heads)
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.encoder_attn = Attention(d_model, n_heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(d_model)
        self.fc1 = nn.Linear(d_model, 4 * d_model)
        self.fc2 = nn.Linear(4 * d_model, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)

    def forward(
        self, x: Tensor, k: Tensor, v: Tensor, weights: bool, dropout: float
    ) -> tuple[Tensor, Tensor | None]:
        """(batch, n, d) to the same, with the cross-attention's log-weights if asked."""
        attended = self.self_attn(self.self_attn_layer_norm(x), causal=True)
        x = x + F.dropout(attended, dropout, self.training)
        heard, log_weights = self.encoder_attn.cross(self.encoder_attn_layer_norm(x), k, v, weights)
        x = x + F.dropout(heard, dropout, self.training)
        hidden = self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return x + F.dropout(hidden, dropout, self.training), log_weights


class Encoder(nn.Module):
    """Two convolutions, the fixed positional table, layers, a last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(shape.n_mels, shape.d_model, 3, padding=1)
        self.conv2 = nn.Conv1d(shape.d_model, shape.d_model, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(shape.n_audio_ctx, shape.d_model)
        self.embed_positions.weight.data.copy_(sinusoids(shape.n_audio_ctx, shape.d_model))
        self.embed_positions.weight.requires_grad_(False)
        self.layers = nn.ModuleList(
            EncoderLayer(shape.d_model, shape.n_heads) for _ in range(shape.encoder_layers)
        )
        self.layer_norm = nn.LayerNorm(shape.d_model)

    def forward(self, mel: Tensor, offsets: Tensor, dropout: float) -> Tensor:
        """Encode slices of the 30 s frame.

        mel: float32 (batch, n_mels, 2 * n). offsets: int64 (batch,), the position in the frame of
        each slice's first encoder step. Returns (batch, n, d).
        """
        x = F.gelu(self.conv1(mel))
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        steps = offsets[:, None] + torch.arange(x.shape[1])
        x = x + self.embed_positions(steps).to(x.dtype)
        for layer in self.layers:
            x = layer(x, dropout)
        out: Tensor = self.layer_norm(x)
        return out


class Decoder(nn.Module):
    """Token and learned position embeddings, layers, a last norm; the output is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.d_model)
        self.embed_positions = nn.Embedding(shape.n_text_ctx, shape.d_model)
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        nn.init.normal_(self.embed_positions.weight, std=0.02)
        self.layers = nn.ModuleList(
            DecoderLayer(shape.d_model, shape.n_heads) for _ in range(shape.decoder_layers)
        )
        self.layer_norm = nn.LayerNorm(shape.d_model)

    def project(self, audio: Tensor) -> list[KeyValues]:
        """Each layer's cross-attention K and V of the encoded audio."""
        pairs = []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            attn = layer.encoder_attn
            pairs.append((attn.split(attn.k_proj(audio)), attn.split(attn.v_proj(audio))))
        return pairs

    def forward(
        self, tokens: Tensor, cross: list[KeyValues], dropout: float
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states (batch, n, d), and the log-weights of all layers but the first."""
        x = self.embed_tokens(tokens) + self.embed_positions.weight[: tokens.shape[1]]
        log_weights = []
        for i, (layer, (k, v)) in enumerate(zip(self.layers, cross, strict=True)):
            x, weights = layer(x, k, v, i > 0, dropout)
            if weights is not None:
                log_weights.append(weights)
        return self.layer_norm(x), log_weights

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary, by the tied embedding."""
        return hidden @ self.embed_tokens.weight.to(hidden.dtype).T


class Whisper(nn.Module):
    """Encoder and decoder under the names of the Hugging Face layout."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.ModuleDict({"encoder": Encoder(shape), "decoder": Decoder(shape)})

    @property
    def encoder(self) -> Encoder:
        """The encoder."""
        part = self.model["encoder"]
        assert isinstance(part, Encoder)
        return part

    @property
    def decoder(self) -> Decoder:
        """The decoder."""
        part = self.model["decoder"]
        assert isinstance(part, Decoder)
        return part


class AuxiliaryHeads(nn.Module):
    """What each encoder step must know while training: the sound and the word spoken there."""

    def __init__(self, d_model: int, n_sounds: int, n_words: int) -> None:
        super().__init__()
        self.sound = nn.Linear(d_model, n_sounds)
        self.word = nn.Linear(d_model, n_words)
