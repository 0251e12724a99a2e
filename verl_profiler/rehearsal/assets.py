"""The generated model and data of a rehearsal, created once in a cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from verl_profiler.environ import REHEARSAL_CACHE
from verl_profiler.rehearsal import dialogue, model

_HERE = Path(__file__).parent
FUNCTION_TOOLS = _HERE / "function_tools.py"
TOOL_CONFIG = _HERE / "tools.yaml"


def default_cache() -> Path:
    """Return `$VERL_PROFILER_REHEARSAL_CACHE`, or a folder in the user's cache directory."""
    given = os.environ.get(REHEARSAL_CACHE)
    return Path(given) if given else Path("~/.cache/verl_profiler").expanduser()


def prompts(cache: Path, seed: int) -> Path:
    """Return the folder of the prompt files, which are written if missing."""
    key = _key([Path(dialogue.__file__)], str(seed))
    return _made(cache / f"prompts-{key}", lambda folder: dialogue.write(folder, seed))


def trained_model(
    cache: Path, function_tools: str | None, tool_config: str | None, seed: int
) -> Path:
    """Return the folder of a model that calls the given tools, trained first if missing.

    The tool files are imported in a separate process, as verl imports them, with all side effects.

    Args:
        cache: Folder for generated models.
        function_tools: verl's `multi_turn.function_tool_path`.
        tool_config: verl's `multi_turn.tool_config_path`.
        seed: Seed of weights and dialogues.
    """
    sources = [Path(model.__file__), Path(dialogue.__file__)]
    sources += [Path(path) for path in (function_tools, tool_config) if path]

    def make(folder: Path) -> None:
        command = [sys.executable, "-m", model.__name__, "--out", str(folder), "--seed", str(seed)]
        if function_tools:
            command += ["--function-tools", function_tools]
        if tool_config:
            command += ["--tool-config", tool_config]
        print(
            "[rehearsal] training a tiny model to call the tools (once, under a minute)", flush=True
        )
        begin = time.monotonic()
        # One thread takes 1.5 times as long as two, but two threads that share their cores with
        # another program took seven times as long.
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        elapsed = time.monotonic() - begin
        print(f"[rehearsal] trained in {elapsed:.0f} s, cached in {cache}", flush=True)

    return _made(cache / f"model-{_key(sources, str(seed))}", make)


def _key(files: list[Path], seed: str) -> str:
    digest = hashlib.sha256(seed.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _made(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return the folder, created atomically by `make` if it does not exist."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        make(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            # Another rehearsal created the same files first.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
