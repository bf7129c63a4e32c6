"""Read a checkpoint's vocabulary: byte-level BPE pieces, and the tokens added to them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cluster.common.errors import CheckpointError
from cluster.common.model.tensor_files import read_json


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`pieces` maps ids of text tokens to bytes, `added` the contents of added tokens to ids.

    `bpe` encodes without added tokens, so that a user's "<|endoftext|>" stays text.
    """

    pieces: dict[int, bytes]
    added: dict[str, int]
    bpe: Tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.bpe.encode(text, add_special_tokens=False).ids
        return ids


def read_vocabulary(folder: Path) -> Vocabulary:
    """Raises CheckpointError if files are missing or hold another kind of tokenizer."""
    definition = read_json(folder / "tokenizer.json") or _definition_from_merges(folder)
    if definition is None:
        raise CheckpointError(
            f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt"
        )
    added = _added_tokens(folder, definition)
    model = definition.get("model", {})
    if model.get("type", "BPE") != "BPE":
        raise CheckpointError(f"{folder}: tokenizer is {model['type']}, expected byte-level BPE")
    vocab: dict[str, int] = model.get("vocab", {})
    plain = definition | {
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    try:
        bpe = Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{folder}: tokenizer cannot be read: {error}") from error
    special = {content: index for content, index in added.items() if _is_special(content)}
    special |= {content: index for content, index in vocab.items() if _is_special(content)}
    pieces = {index: _piece_bytes(piece) for piece, index in vocab.items()}
    pieces |= {index: content.encode() for content, index in added.items()}
    for index in special.values():
        pieces.pop(index, None)
    return Vocabulary(pieces=pieces, added=added | special, bpe=bpe)


def _is_special(content: str) -> bool:
    return len(content) > 4 and content.startswith("<|") and content.endswith("|>")


def _added_tokens(folder: Path, definition: dict[str, Any]) -> dict[str, int]:
    added: dict[str, int] = read_json(folder / "added_tokens.json") or {}
    config = read_json(folder / "tokenizer_config.json") or {}
    decoder = config.get("added_tokens_decoder", {})
    added |= {item["content"]: int(index) for index, item in decoder.items()}
    added |= {item["content"]: item["id"] for item in definition.get("added_tokens") or []}
    return added


def _definition_from_merges(folder: Path) -> dict[str, Any] | None:
    vocab = read_json(folder / "vocab.json")
    if vocab is None or not (folder / "merges.txt").is_file():
        return None
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def _byte_of_character() -> dict[str, int]:
    """Map the characters of byte-level BPE to the bytes that they stand for.

    Bytes that print in Latin-1 stand for themselves; the other 68 follow from U+0100 upward.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE = _byte_of_character()


def _piece_bytes(piece: str) -> bytes:
    try:
        return bytes(_BYTE[character] for character in piece)
    except KeyError:  # a piece that some fine-tuning added as plain text
        return piece.encode()
