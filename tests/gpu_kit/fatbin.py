"""What a compiled library holds: machine code for which GPUs, and calls of CUDA's driver.

Reads the containers that nvcc puts into it: a header, then entries, each with its kind and its
architecture. Layout as in CUDA's fatbinary_section.h and as the 13.0 compiler writes it.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER = struct.Struct("<IHHQ")  # magic, version, size of the header, size of the entries
ENTRY = struct.Struct("<HHIQ")  # kind, version, size of the entry's header, size of its content
ARCHITECTURE = 28  # where in the entry's header it stands, as an int32: 90 for sm_90 and sm_90a
MACHINE_CODE = 2  # the kind; 1 is PTX


def architectures(library: Path) -> set[int]:
    """Such as {80, 90} for a library with code for sm_80 and sm_90a."""
    content = library.read_bytes()
    found: set[int] = set()
    begin = content.find(MAGIC)
    while begin >= 0:
        _, _, header_bytes, size = HEADER.unpack_from(content, begin)
        place = begin + header_bytes
        end = place + size
        while place < end:
            kind, _, header, n_bytes = ENTRY.unpack_from(content, place)
            if kind == MACHINE_CODE:
                found.add(struct.unpack_from("<i", content, place + ARCHITECTURE)[0])
            place += header + n_bytes
        begin = content.find(MAGIC, end)
    return found


def driver_calls(library: Path) -> list[str]:
    """Names of functions of libcuda among the library's symbols, such as cuLaunchKernel."""
    names = re.findall(rb"\x00(cu[A-Z]\w+)(?=\x00)", library.read_bytes())
    return sorted({name.decode() for name in names})
