"""Programs that tests call and pip does not install, each with its Debian package.

Run as a module it prints the packages that are missing, which `make tools` installs.
"""

from __future__ import annotations

import os
import shutil

import pytest

PACKAGES = {
    "chromium": "chromium",
    "curl": "curl",
    "espeak-ng": "espeak-ng",
    "ffmpeg": "ffmpeg",
    "flite": "flite",
    "ip": "iproute2",
    "nft": "nftables",
    "nginx": "nginx-light",
    "node": "nodejs",
    "npm": "npm",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "rsync": "rsync",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")  # Debian leaves them out of a user's PATH


def path_of(program: str) -> str | None:
    assert program in PACKAGES, f"{program} is not in PACKAGES: `make tools` would not install it"
    return shutil.which(program, path=os.pathsep.join((os.environ["PATH"], *SYSTEM_FOLDERS)))


def missing(*programs: str) -> str | None:
    absent = [program for program in programs if path_of(program) is None]
    return f"needs {', '.join(absent)} (`make tools` installs it)" if absent else None


def needs(*programs: str) -> pytest.MarkDecorator:
    reason = missing(*programs)
    return pytest.mark.skipif(reason is not None, reason=str(reason))


def require(program: str) -> str:
    if reason := missing(program):
        pytest.skip(reason)
    return str(path_of(program))


def missing_packages() -> list[str]:
    return sorted({package for program, package in PACKAGES.items() if path_of(program) is None})


if __name__ == "__main__":
    print(*missing_packages())
