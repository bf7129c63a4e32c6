"""Several hosts on this machine: network namespaces joined by a bridge.

Each has its own processes, home, /tmp, shared memory and sshd; they end with its first process.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.serve.distribution import package_root
from tests.support.programs import missing

NETWORK = "10.77.0"
HOME = "/mnt"  # of root on each host: its real one may hold this Python
PROGRAMS = ("ip", "nft", "rsync", "ssh", "ssh-keygen", "sshd")
UNSHARE = "unshare --mount --pid --fork --kill-child --uts --ipc --mount-proc"
SSHD = """\
ListenAddress {address}
HostKey /mnt/.ssh/host_key
AuthorizedKeysFile /mnt/.ssh/authorized_keys
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
"""
START = """\
set -e
mount --make-rprivate /
mount --bind {home} /mnt
mount --bind {home}/passwd /etc/passwd
{shown}
mount --rbind {tmp} /tmp
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
hostname {name}
echo up > /tmp/up
exec {last}
"""


def missing_for_hosts() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root, for network namespaces"
    if reason := missing(*PROGRAMS):
        return reason
    probe = subprocess.run(
        [*UNSHARE.split(), "--net", "ip", "link", "add", "probe", "type", "veth"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else None


@dataclass(frozen=True, slots=True)
class Host:
    """One host. home: where its HOME lies on this machine; bridge: what joins it to the others."""

    name: str
    address: str
    home: Path
    process: subprocess.Popen[bytes]
    bridge: str

    def run(
        self, command: str, timeout_s: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        entered = ["nsenter", "--target", str(self.first_pid()), "--all"]
        try:
            run = subprocess.run(
                [*entered, "bash", "-c", f"cd; . ~/.bashrc; {command}"],
                env={"HOME": HOME, "PATH": os.environ["PATH"], "TERM": "dumb", "COLUMNS": "150"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            said = ((error.stdout or b"") + (error.stderr or b"")).decode(errors="replace")
            raise AssertionError(
                f"{self.name}: not over after {timeout_s:.0f} s: {command}\n{said}"
            ) from error
        if check and run.returncode:
            raise AssertionError(f"{self.name}: {command}\n{run.stdout}\n{run.stderr}")
        return run

    def processes(self) -> list[str]:
        lines = self.run("ps -eo pid,args --no-headers").stdout.splitlines()
        return [line for line in lines if "ps -eo" not in line and "sshd" not in line]

    def first_pid(self) -> int:
        """`unshare` forks: its child is the first process of the host."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text().split()[0])


@contextmanager
def hosts(folder: Path, *names: str) -> Iterator[list[Host]]:
    """At NETWORK.10, .11 and so on; each lets the key of the first one in."""
    keys = folder / "keys"
    keys.mkdir(parents=True)
    for key in ("id_ed25519", "host_key"):
        _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / key))
    with ExitStack() as stack:
        bridge, spaces = stack.enter_context(networks(len(names)))
        made = []
        for number, (name, (space, address)) in enumerate(zip(names, spaces, strict=True)):
            host = _start(
                folder / name, name, address, (space, bridge), keys, is_operator=number == 0
            )
            stack.callback(_end, host)
            made.append(host)
        yield made


@contextmanager
def networks(number: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    mark = f"{os.getpid() % 100000}"
    bridge = f"ssb{mark}"
    with ExitStack() as stack:
        _call("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_call, "ip", "link", "del", bridge)
        _call("ip", "link", "set", bridge, "up")
        made = []
        for one in range(number):
            space, cable, address = f"ss{mark}-{one}", f"ssv{mark}-{one}", f"{NETWORK}.{10 + one}"
            _call("ip", "netns", "add", space)
            stack.callback(_call, "ip", "netns", "del", space)
            _call(
                *("ip", "link", "add", cable, "master", bridge, "up", "type", "veth"),
                *("peer", "name", "eth0", "netns", space),
            )
            stack.callback(_call, "ip", "link", "del", cable)
            for command in (
                "link set lo up",
                "link set eth0 up",
                f"addr add {address}/24 dev eth0",
            ):
                _call("ip", "-n", space, *command.split())
            made.append((space, address))
        yield bridge, made


def _start(
    folder: Path,
    name: str,
    address: str,
    network: tuple[str, str],
    keys: Path,
    *,
    is_operator: bool,
) -> Host:
    space, bridge = network
    home, tmp = folder / "home", folder / "tmp"
    (home / ".ssh").mkdir(parents=True)
    tmp.mkdir()
    shutil.copy(keys / "host_key", home / ".ssh")
    shutil.copy(keys / "id_ed25519.pub", home / ".ssh" / "authorized_keys")
    (home / ".ssh" / "sshd_config").write_text(SSHD.format(address=address))
    if is_operator:
        shutil.copy(keys / "id_ed25519", home / ".ssh")
    make_environment(home / "splitscribe", Path(HOME) / "splitscribe")
    (home / ".bashrc").write_text("")
    users = Path("/etc/passwd").read_text()
    (home / "passwd").write_text(re.sub(r"^(root:.*):/root:", rf"\1:{HOME}:", users, flags=re.M))
    last = "sleep infinity" if is_operator else "/usr/sbin/sshd -D -e -f /mnt/.ssh/sshd_config"
    script = START.format(home=home, tmp=tmp, shown=_shown(tmp), name=name, last=last)
    log = (folder / "host.log").open("wb")
    process = subprocess.Popen(
        [*f"ip netns exec {space} {UNSHARE} bash -c".split(), script],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={"PATH": os.environ["PATH"], "HOME": HOME},
        start_new_session=True,
    )
    host = Host(name, address, home, process, bridge)
    deadline = time.monotonic() + 10
    while not (tmp / "up").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"host {name}: {(folder / 'host.log').read_text()}")
        time.sleep(0.02)
    return host


def _shown(tmp: Path) -> str:
    """Commands that keep this checkout and its Python in sight where they lie in /tmp."""
    folders = {package_root(), Path(sys.prefix).resolve()}
    commands = []
    for folder in sorted(one for one in folders if one.is_relative_to("/tmp")):
        there = tmp / folder.relative_to("/tmp")
        commands.append(f"mkdir -p {there}; mount --bind {folder} {there}")
    return "\n".join(commands)


def make_environment(folder: Path, seen_as: Path) -> None:
    """A virtual environment with this Python's packages but for splitscribe; pip, ray and serve."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    base = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(base)
    # A path in a .pth file is searched, its own .pth files (an editable install) are not read.
    (packages / "shared.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    for name, module, function in (
        ("pip", "pip._internal.cli.main", "main"),
        ("ray", "ray.scripts.scripts", "main"),
        ("serve", "ray.serve.scripts", "cli"),
    ):
        script = folder / "bin" / name
        script.write_text(
            textwrap.dedent(f"""\
                #!{seen_as}/bin/python
                import sys
                from {module} import {function}
                sys.exit({function}())
                """)
        )
        script.chmod(0o755)


def _end(host: Host) -> None:
    host.process.kill()  # --kill-child: and with it the host's first process, and so all of them
    host.process.wait(10)


def _call(*command: str) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise AssertionError(f"{shlex.join(command)}: {run.stderr.strip()}")
