"""A Dockerfile's steps in a fresh Debian root, where there is no Docker: it finds what is missing.

    make wheel; python -m tests.support.image_root cpu      # root, mmdebstrap, the network

RUN, COPY, ARG, ENV, USER and WORKDIR are followed. The base is not the image's: Debian's packages
stand for what FROM names, with what such an image has of its own. At the end the image's user does
what needs the system: `splitscribe demo`, and for GPUs the compilation of a launcher as Triton does
it. Docker's layers, its HEALTHCHECK and the CUDA toolkit are not tried.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from cluster.serve.distribution import package_root

VENV = "python3 -m venv /usr/local"  # as Docker's python images have python and pip in /usr/local
BASES = {
    "cpu": ("bookworm", "ca-certificates,python3,python3-venv", VENV),
    "cuda": ("trixie", "ca-certificates,build-essential", "useradd --create-home ubuntu"),
}
DEMO = "splitscribe demo"
LAUNCHER = (
    "include=$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"include\"))'); "
    "echo '#include <Python.h>' | gcc -fsyntax-only -I $include -x c - && echo a launcher compiles"
)
LAST = {"cpu": DEMO, "cuda": f"{LAUNCHER} && {DEMO}"}
SHOWN = ("/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt")
ENTER = """\
set -e
mount --make-rprivate /
mount -t proc proc {root}/proc
mount --rbind /dev {root}/dev
mount --rbind /sys {root}/sys
mount -t tmpfs tmpfs {root}/dev/shm
mount -t tmpfs tmpfs {root}/run
{binds}
exec chroot {root} setpriv --reuid {user} --regid {user} --init-groups \
    sh -c 'cd "$0" && exec sh -c "$1"' {folder} {command}
"""


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Each instruction with its arguments, its continued lines in one."""
    text = "\n".join(
        line for line in dockerfile.read_text().splitlines() if not line.startswith("#")
    )
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (one.partition(" ") for one in lines) if word]


class Root:
    def __init__(self, folder: Path, shown: list[str]) -> None:
        self.folder = folder
        self.shown = shown
        self.user, self.work = "root", "/"
        self.environ = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        passed = ("PIP_", "TORCH_INDEX", "DEBIAN_FRONTEND")
        self.arguments = {k: v for k, v in os.environ.items() if k.startswith(passed)}

    def run(self, command: str) -> None:
        binds = []
        for name in self.shown:
            there = f"{self.folder}{name}"
            make = "mkdir -p" if Path(name).is_dir() else "install -D /dev/null"
            binds.append(f"test -e {there} || {make} {there}; mount --bind {name} {there}")
        script = ENTER.format(
            root=self.folder,
            binds="\n".join(binds),
            user=self.user,
            folder=self.work,
            command=shlex.quote(command),
        )
        home = "/root" if self.user == "root" else f"/home/{self.user}"
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc"]
        subprocess.run(
            [*namespaces, "bash", "-c", script],
            env={"HOME": home, **self.arguments, **self.environ},
            stdin=subprocess.DEVNULL,
            check=True,
        )

    def follow(self, word: str, rest: str) -> None:
        if word == "RUN":
            self.run(rest)
        elif word == "ARG":
            name, _, default = rest.partition("=")
            self.arguments.setdefault(name, default)
        elif word == "ENV":
            for part in shlex.split(rest):
                name, _, value = part.partition("=")
                self.environ[name] = value.replace("$PATH", self.environ["PATH"])
        elif word == "COPY":
            *sources, to = rest.split()
            there = self.folder / to.lstrip("/")
            there.mkdir(parents=True, exist_ok=True)
            for file in (file for one in sources for file in package_root().glob(one)):
                shutil.copy(file, there)
        elif word == "USER":
            self.user = rest
        elif word == "WORKDIR":
            self.work = rest


def size_mb(folder: Path) -> int:
    said = subprocess.run(["du", "-sxm", folder], capture_output=True, text=True, check=True)
    return int(said.stdout.split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("image", choices=sorted(BASES))
    parser.add_argument("--root", type=Path, default=Path("/var/tmp/splitscribe-root"))
    parser.add_argument("--show", action="append", default=[], help="a path here, to bind there")
    args = parser.parse_args()
    suite, packages, first = BASES[args.image]
    shutil.rmtree(args.root, ignore_errors=True)
    make = ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={packages}"]
    subprocess.run([*make, suite, args.root, "http://deb.debian.org/debian"], check=True)
    args.root.chmod(0o755)
    root = Root(args.root, [*SHOWN, *args.show])
    root.run(first)
    base = size_mb(args.root)
    for word, rest in instructions(package_root() / f"configs/docker/{args.image}.Dockerfile"):
        print(word, rest if len(rest) < 100 else f"{rest[:100]} ...", flush=True)
        root.follow(word, rest)
    root.run(LAST[args.image])
    print(f"{args.image}: {base} MB of Debian, and {size_mb(args.root) - base} MB by the steps")


if __name__ == "__main__":
    main()
