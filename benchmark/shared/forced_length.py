"""Random checkpoints in published shapes whose windows all take the same number of tokens.

The length is in the weights: the decoder's position embeddings say at each position whether
<|0.00|>, text or <|endoftext|> comes next, louder than all else in the residual stream. So every
engine does its full work and stops by its own rule, without an option. Start sequences must have
three tokens (transcript, language, task): with timestamps and without a prompt.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmark.shared.flops import START_TOKENS
from cluster.common.model.dims import EMBED_TOKENS
from tests.support.checkpoints import ModelShape, make_checkpoint, special_tokens

FULL_VOLUME = 3.0  # times the residual stream's norm: it alone decides the token
HALF_VOLUME = 1.0  # the layers still choose among the tokens of text
VOICE = 2.0  # norm of the answering direction in a token's embedding


def forced_checkpoint(folder: Path, shape: ModelShape, n_tokens: int) -> Path:
    """Write a checkpoint that samples `n_tokens` (<|0.00|>, then text) and then ends its window.

    If `folder` holds the same checkpoint, it is kept. Returns `folder`.
    """
    done = folder / "forced.json"
    if done.is_file() and json.loads(done.read_text()) == {"n_tokens": n_tokens}:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    make_checkpoint(folder, shape, dtype="float32")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    prefix = "model." if f"model.{EMBED_TOKENS}" in tensors else ""
    positions = tensors[f"{prefix}decoder.embed_positions.weight"]
    tokens = tensors[f"{prefix}{EMBED_TOKENS}"]
    _force(positions, tokens, special_tokens(shape), shape, n_tokens)
    save_file(tensors, file, metadata={"format": "pt"})
    done.write_text(json.dumps({"n_tokens": n_tokens}))  # last: the folder is whole
    return folder


def _force(
    positions: Tensor, tokens: Tensor, special: dict[str, int], shape: ModelShape, n_tokens: int
) -> None:
    """Write the schedule into position embeddings [n_ctx, d] and token embeddings [n_vocab, d]."""
    eot = special["<|endoftext|>"]
    # Three directions of equal, small entries: no outlier for 8-bit weights or activations.
    generator = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, (3, shape.d_model), generator=generator).float() * 2 - 1
    begin, text, end = (signs / math.sqrt(shape.d_model)).to(positions.dtype)
    # A layer adds at most three sublayers of about unit variance to each entry.
    residual = math.sqrt(shape.d_model * (1 + 3 * shape.decoder_layers))
    first = START_TOKENS - 1  # the position whose output is the first sampled token
    last = first + n_tokens
    positions[first] += FULL_VOLUME * residual * begin
    positions[first + 1 : last] += HALF_VOLUME * residual * text
    # And a direction of its own for each, or one token would follow itself for ever.
    own = torch.randn(n_tokens - 1, shape.d_model, generator=generator) / math.sqrt(shape.d_model)
    positions[first + 1 : last] += HALF_VOLUME * residual * own.to(positions.dtype)
    positions[last:] += FULL_VOLUME * residual * end
    tokens[special["<|0.00|>"]] += VOICE * begin
    tokens[:eot] += VOICE / 2 * text
    tokens[eot:] -= VOICE / 2 * text
    tokens[eot] += VOICE * end
