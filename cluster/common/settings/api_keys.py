"""API keys as settings and key files write them: `KEY`, or `NAME KEY`.

A key is printable ASCII, so that it can be sent in every way in which clients send keys. Its name
stands for it in logs and metrics. Errors (ValueError) never show an entry: it may be a key.
"""

from __future__ import annotations

import re

SECRET_PREFIX = "ek_"  # of client secrets, which are sent as keys
_ENTRY = re.compile(r"(?:([A-Za-z0-9_.@+-]{1,64})[ \t]+)?([!-~]+)")


def named_key(entry: str) -> tuple[str, str]:
    if not entry.strip():
        raise ValueError("an API key is empty; leave it out to serve without keys")
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise ValueError("an API key is printable ASCII without spaces, alone or after a name")
    name, key = found[1] or "", found[2]
    if key.startswith(SECRET_PREFIX):
        raise ValueError(f"an API key begins with {SECRET_PREFIX}, as client secrets do")
    if name and key.startswith("#"):
        raise ValueError("a comment behind an API key; it needs a line of its own")
    if len(name) > len(key):
        raise ValueError("an API key is shorter than its name; the name comes first, then the key")
    return name, key


def checked_keys(entries: tuple[str, ...]) -> tuple[str, ...]:
    for entry in entries:
        named_key(entry)
    return entries
