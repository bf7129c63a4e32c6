"""Find a checkpoint's files, and index the tensors in them by their headers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cluster.common.errors import CheckpointError
from cluster.common.model.dims import EMBED_TOKENS, PROJ_OUT
from cluster.common.settings import BUNDLED_MODEL

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself
_SAMPLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """`key` is the name inside `file`, and `offset` the first byte of the data there."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the folder's safetensors files. Raises CheckpointError if one or all are missing."""
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    if (folder / INDEX_FILE).is_file():
        weight_map = (read_json(folder / INDEX_FILE) or {}).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{folder / INDEX_FILE} is not an index of safetensors shards")
        files = tuple(
            folder / name for name in sorted({str(shard) for shard in weight_map.values()})
        )
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} is incomplete: {INDEX_FILE} names {', '.join(missing)}, "
                "which is not there; download the checkpoint again"
            )
        return files
    if any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder} has its weights only as pytorch_model.bin, which can run code when it is "
            'loaded; convert it once: python -c "from transformers import '
            "WhisperForConditionalGeneration as W; "
            f"W.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    raise CheckpointError(
        f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
    )


def index_tensors(files: tuple[Path, ...]) -> dict[str, TensorEntry]:
    """Index all tensors by name (without `model.`). Raises CheckpointError for a malformed file."""
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for entry in _read_header(file):
            entries[entry.key.removeprefix("model.")] = entry
    if EMBED_TOKENS not in entries and PROJ_OUT in entries:
        entries[EMBED_TOKENS] = entries[PROJ_OUT]
    return entries


def content_digest(entries: Mapping[str, TensorEntry]) -> str:
    """Return a hex digest of names, types, shapes and samples, however the files are sharded."""
    digest = hashlib.sha256()
    streams = {file: file.open("rb") for file in {entry.file for entry in entries.values()}}
    try:
        for name, entry in sorted(entries.items()):
            digest.update(repr((name, entry.dtype, entry.shape)).encode())
            stream = streams[entry.file]
            stream.seek(entry.offset + max(0, entry.n_bytes // 2 - _SAMPLE_BYTES))
            digest.update(stream.read(min(_SAMPLE_BYTES, entry.n_bytes)))
    finally:
        for stream in streams.values():
            stream.close()
    return digest.hexdigest()


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the file's JSON object, or None without the file. Raises CheckpointError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return content


def _read_header(file: Path) -> Iterator[TensorEntry]:
    """Safetensors: 8 bytes of little-endian header length, that much JSON, then the data."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{file} is not a safetensors file, or it is truncated")
        try:
            header: dict[str, Any] = json.loads(stream.read(header_bytes))
        except ValueError as error:
            raise CheckpointError(f"{file} is not a safetensors file") from error
    data = 8 + header_bytes
    for key, item in header.items():
        if key == "__metadata__":
            continue
        begin, end = item["data_offsets"]
        if data + end > size:
            raise CheckpointError(
                f"{file} is truncated: {size} bytes where tensor {key} ends at {data + end}; "
                "download the checkpoint again"
            )
        yield TensorEntry(file, key, item["dtype"], tuple(item["shape"]), data + begin, end - begin)


BUNDLED_FOLDER = Path(__file__).resolve().parents[2] / "demo" / "checkpoint"

# openai/whisper's short names, which its users type out of habit.
_SIZES = ("tiny", "base", "small", "medium")
SHORT_NAMES = {
    **{size: f"openai/whisper-{size}" for size in (*_SIZES, "large", "large-v2", "large-v3")},
    **{f"{size}.en": f"openai/whisper-{size}.en" for size in _SIZES},
    "turbo": "openai/whisper-large-v3-turbo",
    "large-v3-turbo": "openai/whisper-large-v3-turbo",
}

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "encoder_context.json",
)
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")


def locate(model: str, weights: bool) -> Path:
    """Return the local folder of `model` (see `open_checkpoint`), downloaded if it is a Hub id.
    Without `weights` the download leaves out the weight files. Raises CheckpointError.
    """
    if model == BUNDLED_MODEL:
        if not (BUNDLED_FOLDER / "config.json").is_file():
            raise CheckpointError(
                f"the bundled checkpoint is missing from this installation ({BUNDLED_FOLDER}); "
                "install the package again, or name a folder or a Hub id"
            )
        return BUNDLED_FOLDER
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.is_file():
        raise CheckpointError(f"{model} is a file; name the folder that holds the checkpoint")
    hub_id = SHORT_NAMES.get(model, model)
    if not _HUB_ID.fullmatch(hub_id):
        raise CheckpointError(f"no such folder: {model} (and it cannot be a Hub id)")
    if "/" not in hub_id:
        raise CheckpointError(
            f"there is no folder {model}, and a Hub id has an owner before a slash; short names "
            f"are {', '.join(SHORT_NAMES)}{_near(model)}"
        )
    return _download(hub_id, weights)


def _near(model: str) -> str:
    known = [BUNDLED_MODEL, *SHORT_NAMES, *SHORT_NAMES.values()]
    near = get_close_matches(model, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near and near[0] != model else ""


def _download(hub_id: str, weights: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo, _, revision = hub_id.partition("@")
    patterns = [*TEXT_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        folder = snapshot_download(repo, revision=revision or None, allow_patterns=patterns)
    except GatedRepoError as error:
        raise CheckpointError(
            f"Hub repository {repo} is gated: accept its terms on its page and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo} is neither a local folder nor a repository on the Hub "
            f"(for a private one, set HF_TOKEN){_near(repo)}"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"Hub repository {repo} has no revision {revision!r}") from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub is unreachable"
        raise CheckpointError(
            f"{repo} is neither a local folder nor in the Hub cache ({constants.HF_HUB_CACHE}), "
            f"and {why}; download it where there is a network, or name a folder{_near(repo)}"
        ) from error
    except Exception as error:  # HTTP and disk failures of a third-party client
        raise CheckpointError(f"cannot download {repo} from the Hub: {error}") from error
    return Path(folder)
