"""Checkpoints open from every layout found in the wild; what is wrong is named."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub_errors
from safetensors.torch import load_file, save_file

from cluster.common.errors import CheckpointError
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.dims import EMBED_TOKENS, cross_kv_shapes, decoder_shapes, encoder_shapes
from cluster.common.model.weights import load_tensors, output_projection
from tests.support.checkpoints import cached_checkpoint, make_checkpoint, random_tensors

WEIGHTS = "model.safetensors"


def edit_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors by name (without `model.`, `__` for `.`); None removes one."""
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        key = f"model.{name.replace('__', '.')}".replace("model.proj_out", "proj_out")
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_every_layout_gives_the_same_tensors(tmp_path: Path, sharded: bool, prefix: str) -> None:
    checkpoint = open_checkpoint(str(make_checkpoint(tmp_path, sharded=sharded, prefix=prefix)))
    dims = checkpoint.dims
    shapes = encoder_shapes(dims) | cross_kv_shapes(dims) | decoder_shapes(dims)
    loaded = load_tensors(checkpoint, shapes)
    expected = random_tensors(dims)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    assert checkpoint.fingerprint == open_checkpoint(str(cached_checkpoint())).fingerprint


def test_the_fingerprint_follows_the_weights_and_nothing_else(tmp_path: Path) -> None:
    first = open_checkpoint(str(make_checkpoint(tmp_path / "a", seed=1))).fingerprint
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "README.md").write_text("a copy")
    assert open_checkpoint(str(tmp_path / "elsewhere")).fingerprint == first
    other = open_checkpoint(str(make_checkpoint(tmp_path / "b", seed=2))).fingerprint
    half = open_checkpoint(str(make_checkpoint(tmp_path / "c", seed=1, dtype="float16")))
    assert len({first, other, half.fingerprint}) == 3


def test_stored_halves_are_converted(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_checkpoint(tmp_path, dtype="bfloat16")))
    names = {EMBED_TOKENS: (2000, 32)}
    assert load_tensors(checkpoint, names)[EMBED_TOKENS].dtype == torch.float32
    half = load_tensors(checkpoint, names, torch.float16)[EMBED_TOKENS]
    assert half.dtype == torch.float16


def test_the_output_projection_is_tied_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    assert output_projection(open_checkpoint(str(folder))) == EMBED_TOKENS
    edit_weights(folder, proj_out__weight=torch.zeros(2000, 32))
    assert output_projection(open_checkpoint(str(folder))) == EMBED_TOKENS
    edit_config(folder, tie_word_embeddings=False)
    assert output_projection(open_checkpoint(str(folder))) == "proj_out.weight"


def test_a_file_with_only_the_output_projection_has_the_embedding_too(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    embedding = load_file(folder / WEIGHTS)[f"model.{EMBED_TOKENS}"]
    edit_weights(folder, decoder__embed_tokens__weight=None, proj_out__weight=embedding)
    checkpoint = open_checkpoint(str(folder))
    assert torch.equal(
        load_tensors(checkpoint, {EMBED_TOKENS: (2000, 32)})[EMBED_TOKENS], embedding
    )


def test_newer_processor_files_are_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    features = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    assert open_checkpoint(str(folder)).preprocessor_config == {}
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": features}))
    assert open_checkpoint(str(folder)).preprocessor_config == features


def test_reading_configs_and_tokenizer_imports_no_torch() -> None:
    program = (
        "import sys; from cluster.common.model.checkpoint import open_checkpoint; "
        "from cluster.common.model.text.tokenizer import WhisperTokenizer; "
        f"c = open_checkpoint({str(cached_checkpoint())!r}); c.fingerprint; "
        "WhisperTokenizer.from_checkpoint(c); "
        "print({'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_without_weights_none_are_asked_for(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / WEIGHTS).unlink()
    assert open_checkpoint(str(folder), weights=False).dims.n_mels == 80


def without(key: str, file: Path) -> None:
    fields = json.loads(file.read_text())
    del fields[key]
    file.write_text(json.dumps(fields))


INDEX, SHARD = f"{WEIGHTS}.index.json", "model-00002-of-00002.safetensors"
# What is done to the folder of a whole checkpoint, in two files of weights, and what is said then.
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
    "half a config": (lambda folder: (folder / "config.json").write_text("{"), "cannot read"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "not hold a JSON object"),
    "another model": (partial(edit_config, model_type="bert"), "model_type 'bert'"),
    "three heads": (
        partial(edit_config, decoder_attention_heads=3),
        "32 does not divide by 3 heads",
    ),
    "relu": (partial(edit_config, activation_function="relu"), "'relu' is not offered"),
    "a key is missing": (
        lambda folder: without("num_mel_bins", folder / "config.json"),
        "'num_mel_bins' is missing",
    ),
    "other features": (
        partial(edit_config, name="preprocessor_config.json", hop_length=80),
        "hop_length = 80, but this model takes 160",
    ),
    "no weights": (lambda folder: (folder / INDEX).unlink(), "has no weights"),
    "only a pickle": (
        lambda folder: (folder / INDEX).rename(folder / "pytorch_model.bin"),
        "save_pretrained",
    ),
    "a missing shard": (
        lambda folder: (folder / SHARD).unlink(),
        f"names {SHARD}, which is not there",
    ),
    "a broken index": (lambda folder: (folder / INDEX).write_text("{}"), "not an index"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, how: str) -> None:
    spoil, told = SPOILT[how]
    spoil(make_checkpoint(tmp_path, sharded=True))
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(str(tmp_path))


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    for name, told in (("nothing", "no such folder"), ("model.bin", "is a file; name the folder")):
        with pytest.raises(CheckpointError, match=told):
            open_checkpoint(str(tmp_path / name))


def test_weights_that_are_no_whole_file_are_refused(tmp_path: Path) -> None:
    file = make_checkpoint(tmp_path) / WEIGHTS
    content = file.read_bytes()
    for spoilt, told in (
        (content[:-1], "truncated: .* ends at"),
        (content[:4], "not a safetensors file"),
        (content[:100], "not a safetensors file"),
        (b"\x04" + bytes(7) + b"text" + bytes(99), "is not a safetensors file"),
    ):
        file.write_bytes(spoilt)
        with pytest.raises(CheckpointError, match=told):
            _ = open_checkpoint(str(tmp_path)).tensors


def test_tensors_that_are_missing_or_have_another_shape_are_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    edit_weights(folder, encoder__conv1__bias=None, encoder__layer_norm__weight=torch.zeros(7))
    checkpoint = open_checkpoint(str(folder))
    shapes = encoder_shapes(checkpoint.dims)
    with pytest.raises(CheckpointError, match=r"lacks 1 of the .*: encoder.conv1.bias"):
        load_tensors(checkpoint, shapes)
    del shapes["encoder.conv1.bias"]
    with pytest.raises(CheckpointError, match=r"encoder.layer_norm.weight is \[7\], .* \[32\]"):
        load_tensors(checkpoint, shapes)
    load_tensors(checkpoint, decoder_shapes(checkpoint.dims))  # the other role is not concerned


TUNED, LIKE_LARGE = "someone/whisper-tuned@v9", "openai/whisper-large-v33"


class TestHub:
    """The client is replaced: no test reaches a network."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = []

        def download(repo: str, **options: Any) -> str:
            seen.append({"repo": repo, **options})
            return str(cached_checkpoint())

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return seen

    def test_only_what_a_role_needs_is_downloaded(self, calls: list[dict[str, Any]]) -> None:
        open_checkpoint("someone/whisper-tuned@v2")
        open_checkpoint("large-v3", weights=False)
        assert (calls[0]["repo"], calls[0]["revision"]) == ("someone/whisper-tuned", "v2")
        assert WEIGHTS in calls[0]["allow_patterns"]
        assert not any("bin" in pattern for pattern in calls[0]["allow_patterns"])
        assert (calls[1]["repo"], calls[1]["revision"]) == ("openai/whisper-large-v3", None)
        assert not any("safetensors" in pattern for pattern in calls[1]["allow_patterns"])
        assert "tokenizer.json" in calls[1]["allow_patterns"]

    @pytest.mark.parametrize(
        ("name", "kind", "match"),
        [
            (TUNED, hub_errors.LocalEntryNotFoundError, "the Hub is unreachable"),
            (LIKE_LARGE, hub_errors.LocalEntryNotFoundError, "mean openai/whisper-large-v3"),
            (TUNED, hub_errors.RepositoryNotFoundError, "neither a local folder nor a repository"),
            (TUNED, hub_errors.GatedRepoError, "set HF_TOKEN"),
            (TUNED, hub_errors.RevisionNotFoundError, "no revision 'v9'"),
            (TUNED, ConnectionError, "cannot download"),
        ],
    )
    def test_failures_say_what_to_do(
        self, monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Exception], match: str
    ) -> None:
        def download(repo: str, **options: Any) -> str:
            raise kind.__new__(kind)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(name)

    @pytest.mark.parametrize(
        ("name", "meant"),
        [("large-v33", "large-v3"), ("trubo", "turbo"), ("demmo", "demo"), ("base-en", "base.en")],
    )
    def test_a_wrong_short_name_gets_the_nearest_at_once(
        self, calls: list[dict[str, Any]], name: str, meant: str
    ) -> None:
        with pytest.raises(CheckpointError, match=rf"tiny, .*; did you mean {re.escape(meant)}\?$"):
            open_checkpoint(name)
        assert not calls
