"""Where a checkpoint's files are: the bundled one, a local folder, or a Hub id's snapshot.

Knows nothing of what is inside the files. The Hub client honours HF_HOME, HF_TOKEN and
HF_HUB_OFFLINE by itself; it is imported only when a Hub id is asked for.
"""

from __future__ import annotations

import re
from pathlib import Path

from cluster.errors import CheckpointError
from cluster.settings import BUNDLED_MODEL

BUNDLED_FOLDER = Path(__file__).resolve().parent.parent / "demo" / "checkpoint"

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
    """The local folder that holds `model`, downloaded when it is a Hub id.

    Args:
        model: "demo", a folder, one of `SHORT_NAMES`, or a Hub id, perhaps with `@revision`.
        weights: False leaves the weight files out of a download (the router needs none).

    Raises:
        CheckpointError: no such folder, and not a Hub id that can be had.
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
    return _download(hub_id, weights)


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
            "(for a private one, set HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"Hub repository {repo} has no revision {revision!r}") from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub is unreachable"
        raise CheckpointError(
            f"{repo} is neither a local folder nor in the Hub cache ({constants.HF_HUB_CACHE}), "
            f"and {why}; download it where there is a network, or name a folder"
        ) from error
    except Exception as error:  # HTTP and disk failures of a third-party client
        raise CheckpointError(f"cannot download {repo} from the Hub: {error}") from error
    return Path(folder)
