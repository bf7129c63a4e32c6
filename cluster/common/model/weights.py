"""Load the tensors that a role asks for, one by one through a memory map."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack

import torch
from safetensors import SafetensorError, safe_open

from cluster.common.errors import CheckpointError
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.dims import EMBED_TOKENS, PROJ_OUT, Shape

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_tensors(
    checkpoint: Checkpoint,
    shapes: Mapping[str, Shape],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Load the tensors named in `shapes`, contiguous. Raises CheckpointError, which names those
    that are missing or have another shape.
    """
    _check_tensors(checkpoint, shapes)
    by_file: dict[str, list[str]] = defaultdict(list)
    for name in shapes:
        by_file[str(checkpoint.tensors[name].file)].append(name)
    loaded: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        for file, names in by_file.items():
            try:
                stream = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                for name in names:
                    tensor = stream.get_tensor(checkpoint.tensors[name].key)
                    loaded[name] = tensor.to(device=device, dtype=dtype)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"cannot read {file}: {error}") from error
    return loaded


def _check_tensors(checkpoint: Checkpoint, shapes: Mapping[str, Shape]) -> None:
    missing = [name for name in shapes if name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks {len(missing)} of the {len(shapes)} tensors that this role "
            f"needs: {_some(missing)}"
        )
    wrong = [
        f"{name} is {list(checkpoint.tensors[name].shape)}, expected {list(shape)}"
        for name, shape in shapes.items()
        if checkpoint.tensors[name].shape != shape
    ]
    if wrong:
        raise CheckpointError(f"{checkpoint.path}: weights do not fit config.json: {_some(wrong)}")


def output_projection(checkpoint: Checkpoint) -> str:
    """Return the name of the tensor [n_vocab, n_text_state] that turns states into logits."""
    tied = checkpoint.config.get("tie_word_embeddings", True)
    return EMBED_TOKENS if tied or PROJ_OUT not in checkpoint.tensors else PROJ_OUT


def _some(items: list[str], limit: int = 5) -> str:
    rest = len(items) - limit
    return "; ".join(items[:limit]) + (f"; and {rest} more" if rest > 0 else "")
