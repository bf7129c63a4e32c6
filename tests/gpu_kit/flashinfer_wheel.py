"""Make one small wheel of flashinfer with our kernels compiled in it.

It has all of flashinfer's Python and the headers of our kernels, but not the sources of kernels for
other models, which are most of it. flashinfer finds compiled kernels under `data/aot`.
"""

from __future__ import annotations

import base64
import hashlib
import platform
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.gpu_kit.packages import FOLDER

PACKAGE = "flashinfer"
DATA = Path(PACKAGE, "data")
SOURCES = DATA / "csrc"  # its folders are other models' kernels, its files ours too
UNUSED = (DATA / "cutlass", DATA / "spdlog")  # headers that ours do not include


def make_wheel(
    kernels: Mapping[str, Path], label: str, target: Path, folder: Path = FOLDER
) -> Path:
    """Write the wheel into `target`, from flashinfer as it is installed in `folder`.

    `kernels` are libraries by name, as `tests.gpu_kit.kernels` compiles them. `label` is the build,
    such as "sm90a", which tells the wheel from flashinfer's own.
    """
    (info,) = folder.glob("flashinfer_python-*.dist-info")
    name, version = info.stem.split("-")
    libc = "_".join(platform.libc_ver()[1].split("."))
    tag = f"py3-none-manylinux_{libc}_{platform.machine()}"  # as the kernels were linked here
    wheel = target / f"{name}-{version}-1{label}-{tag}.whl"
    written: list[str] = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:

        def add(path: str, content: bytes) -> None:
            archive.writestr(path, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            written.append(f"{path},sha256={digest.decode()},{len(content)}")

        for file in _kept(folder):
            add(str(file), (folder / file).read_bytes())
        for kernel, library in sorted(kernels.items()):
            add(f"{PACKAGE}/data/aot/{kernel}/{kernel}.so", library.read_bytes())
        add(f"{info.name}/METADATA", (info / "METADATA").read_bytes())
        add(f"{info.name}/LICENSE", next(info.rglob("LICENSE")).read_bytes())
        described = (
            f"Wheel-Version: 1.0\nGenerator: splitscribe\nRoot-Is-Purelib: true\nTag: {tag}\n"
        )
        add(f"{info.name}/WHEEL", described.encode())
        archive.writestr(f"{info.name}/RECORD", "\n".join([*written, f"{info.name}/RECORD,,"]))
    return wheel


def _kept(folder: Path) -> Iterator[Path]:
    for path in sorted((folder / PACKAGE).rglob("*")):
        file = path.relative_to(folder)
        of_others = file.is_relative_to(SOURCES) and file.parent != SOURCES
        of_others |= any(file.is_relative_to(unused) for unused in UNUSED)
        if path.is_file() and not of_others and "__pycache__" not in file.parts:
            yield file
