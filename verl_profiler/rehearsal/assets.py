"""The generated model and data of a rehearsal, made once and kept in a cache folder."""

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

from verl_profiler.rehearsal import data, dialogue, model

__all__ = ["default_cache", "prompts", "taught_model"]

HERE = Path(__file__).parent
FUNCTION_TOOLS = HERE / "function_tools.py"
TOOL_CONFIG = HERE / "tools.yaml"


def default_cache() -> Path:
    """Return `$VERL_PROFILER_CACHE`, or a folder in the user's cache."""
    given = os.environ.get("VERL_PROFILER_CACHE")
    return Path(given) if given else Path("~/.cache/verl_profiler").expanduser()


def prompts(cache: Path, seed: int) -> Path:
    """Return the folder of the prompt files, which are written first where they are missing."""
    key = _key([Path(data.__file__), Path(dialogue.__file__)], str(seed))
    return _made(cache / f"prompts-{key}", lambda folder: data.write(folder, seed))


def taught_model(
    cache: Path, function_tools: str | None, tool_config: str | None, seed: int
) -> Path:
    """Return the folder of a model that calls the tools given, taught first where it is missing.

    The tools' files are read in a process of their own, as verl reads them, with all that importing
    them does.

    Args:
        cache: Folder of all generated models.
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
            "[rehearsal] teaching a tiny model to call the tools (once, under a minute)", flush=True
        )
        begin = time.monotonic()
        # One thread takes half as long again as two, but two that must share their cores with
        # another program took seven times as long.
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        elapsed = time.monotonic() - begin
        print(f"[rehearsal] taught in {elapsed:.0f} s, kept in {cache}", flush=True)

    return _made(cache / f"model-{_key(sources, str(seed))}", make)


def _key(files: list[Path], seed: str) -> str:
    digest = hashlib.sha256(seed.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _made(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return the folder, filled by `make` if it does not exist: whole or not at all."""
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
            # Another rehearsal was faster; its files are the same.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
