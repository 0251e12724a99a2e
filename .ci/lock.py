"""Write the lock of the rehearsal: each package of the lists with its version and the hash of its file.

    python .ci/lock.py sglang

torch is not in it: its CPU builds have other hashes than those with CUDA.
"""

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

LISTS = Path(__file__).parents[1] / "verl_profiler" / "rehearsal"


def resolved(*words):
    """Return what pip would install: name, version and hash by name, without torch."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "-q", "--report", report, *words], check=True)
        items = json.loads(report.read_text())["install"]
    found = {}
    for item in items:
        about = item["metadata"]
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest and about["name"] != "torch":
            line = f"{about['name']}=={about['version']} --hash=sha256:{digest}"
            found[about["name"].lower()] = line
    return found


def main(engine):
    """Resolve the lists of an engine, and what `.[report]` needs besides."""
    root, listed = str(LISTS.parents[1]), LISTS / f"requirements-{engine}"
    lines = resolved("-r", f"{listed}.txt", f"{root}[report]")
    lines |= resolved("--no-deps", "-r", f"{listed}-no-deps.txt")
    head = f"# Python {sys.version_info[0]}.{sys.version_info[1]}, {platform.machine()}; by .ci/lock.py."
    content = "\n".join([head, *(lines[name] for name in sorted(lines))]) + "\n"
    (LISTS / f"lock-{engine}.txt").write_text(content)


if __name__ == "__main__":
    main(sys.argv[1])
