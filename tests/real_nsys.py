"""A real nsys for the tests: Debian's non-free package, unpacked into the user's cache folder.

Nothing is installed into the system and nothing of it is ever committed; its licence is NVIDIA's.
`python tests/real_nsys.py` fetches it and prints the folder to put on PATH.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "2022.4.2.1"
# nvtx >= 0.2.12 records nothing under this nsys.
NVTX = "0.2.11"
PACKAGES = ("nsight-systems", "nsight-systems-target", "libssh-4")
_SOURCE = (
    "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "
    "http://deb.debian.org/debian bookworm main non-free\n"
)


class CannotBeHad(Exception):
    """Why there is no nsys on this machine."""


def cache() -> Path:
    """Return the folder that the packages are unpacked into."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "verl_profiler" / f"nsys-{VERSION}"


def folder() -> Path:
    """Return the folder with a working `nsys`, fetching it the first time.

    Raises:
        CannotBeHad: With the reason.
    """
    binaries = cache() / "usr" / "lib" / "nsight-systems" / "bin"
    if not (binaries / "nsys").exists():
        _fetch()
    found = _run([str(binaries / "nsys"), "--version"], timeout=60)
    if VERSION[:6] not in found:
        raise CannotBeHad(f"nsys --version says {found!r}")
    return binaries


def environment() -> dict[str, str]:
    """Return PATH and PYTHONPATH with a real nsys and an nvtx that it hears.

    Raises:
        CannotBeHad: With the reason.
    """
    nvtx = cache().with_name(f"nvtx-{NVTX}-{sys.version_info[0]}{sys.version_info[1]}")
    nvtx.parent.mkdir(parents=True, exist_ok=True)
    with nvtx.with_suffix(".lock").open("w") as lock:
        # Other workers of the tests fetch the same.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (nvtx / "nvtx").is_dir():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            _run([*pip, "--target", str(nvtx), f"nvtx=={NVTX}"], timeout=180)
        folders = {"PATH": str(folder()), "PYTHONPATH": str(nvtx)}
    return {
        name: os.pathsep.join(filter(None, (first, os.environ.get(name, ""))))
        for name, first in folders.items()
    }


def _fetch() -> None:
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise CannotBeHad(f"there is no {tool}, so Debian's package cannot be unpacked")
    root = cache().with_name(cache().name + ".part")
    shutil.rmtree(root, ignore_errors=True)
    apt = root / "apt"
    for path in (
        "state/lists/partial",
        "cache/archives/partial",
        "etc/apt.conf.d",
        "etc/sources.d",
    ):
        (apt / path).mkdir(parents=True)
    (apt / "sources.list").write_text(_SOURCE)
    (apt / "status").touch()
    options = [
        f"Dir::State={apt}/state",
        f"Dir::State::status={apt}/status",
        f"Dir::Cache={apt}/cache",
        f"Dir::Etc::sourcelist={apt}/sources.list",
        f"Dir::Etc::sourceparts={apt}/etc/sources.d",
        "APT::Sandbox::User=",
    ]
    command = ["apt-get", *(word for option in options for word in ("-o", option))]
    _run([*command, "update"], timeout=180)
    _run([*command, "download", *PACKAGES], timeout=600, cwd=apt)
    for package in apt.glob("*.deb"):
        _run(["dpkg", "-x", str(package), str(root)], timeout=300)
    shutil.rmtree(apt)
    _link(root)
    shutil.rmtree(cache(), ignore_errors=True)
    root.rename(cache())


def _link(root: Path) -> None:
    """Put the pieces where nsys looks for them: the host's files beside the target's."""
    target = root / "usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64"
    host = root / "usr/lib/nsight-systems/host-linux-x64"
    (target.parent / host.name).symlink_to(os.path.relpath(host, target.parent))
    for library in (root / "usr/lib/x86_64-linux-gnu").glob("libssh.so*"):
        for folder in (target, host):
            if not os.path.lexists(folder / library.name):
                (folder / library.name).symlink_to(os.path.relpath(library, folder.resolve()))


def _run(command: list[str], *, timeout: float, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, cwd=cwd, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBeHad(f"{command[0]} failed: {error}") from None
    if done.returncode:
        raise CannotBeHad(f"{' '.join(command[-3:])} failed: {(done.stderr or done.stdout)[-300:]}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(folder())
    except CannotBeHad as error:
        sys.exit(f"no nsys: {error}")
