"""NVIDIA Nsight Systems: Ray starts captured processes under `nsys profile`.

A capture is delimited by two calls that nsys waits for: the NVTX range `capture` of the domain
`verl_profiler`, or `cudaProfilerStart` and `cudaProfilerStop` with capture-range=cudaProfilerApi.
nsys numbers its reports and finishes them after the capture, in processes of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.capture.tools import (
    STARTED_BY_HOST,
    MachineCheck,
    Options,
    Tool,
)
from verl_profiler.errors import ConfigError, ReadingError
from verl_profiler.events.vocabulary import NVTX_DOMAIN

if TYPE_CHECKING:
    from verl_profiler.capture.plan import NsightSettings, RoleCapture

_RANGE = "capture"
_RANGE_START, _CUDA_START = "nvtx", "cudaProfilerApi"
_BY_RANGE = {
    "capture-range": _RANGE_START,
    "nvtx-capture": f"{_RANGE}@{NVTX_DOMAIN}",
    "kill": "none",
}
# Without a GPU nsys has no CUDA to query, and sampling needs rights that containers lack.
_WITHOUT_CUDA = {"trace": "nvtx", "sample": "none", "cpuctxsw": "none"}
_PROBE_TRIES, _PROBE_TIMEOUT_S, _TIMED_OUT = 3, 120, -2
# nvtx takes a tool that is too old for none, and then returns a domain that does nothing.
_PROBE_NVTX = (
    "import nvtx; get = getattr(nvtx, 'get_domain', None); "
    "print('domain', type(get('verl_profiler')).__name__ if get else '')"
)


class _Nsys(Tool):
    name = title = "nsys"
    suffix = ".nsys-rep"
    unfinished_suffixes = (".qdstrm", ".nsys-rep.tmp")
    finishes_late = True
    count_cause = (
        "nsys ended before this capture: capture-range-end counts fewer captures than there "
        "were; set it under profiler.nsight.options"
    )
    no_report_cause = (
        "nsys wrote nothing: the process was not started under nsys, nsys was killed before it "
        "wrote, or the capture range never reached it"
    )

    def options(
        self, config: Any, settings: NsightSettings, key: str, output: str, captures: int
    ) -> dict[str, str]:
        """Take verl's own options, then those of `profiler.nsight.options`, then set missing ones."""
        from omegaconf import OmegaConf

        native: Any = OmegaConf.select(config, "global_profiler.global_tool_config.nsys") or {}
        name = "worker_nsight_options" if key == "workers" else "controller_nsight_options"
        options = as_text(native.get(name) or {})
        on_cuda = _on_cuda(config)
        if not on_cuda:
            options = {k: v for k, v in options.items() if not k.startswith("cuda-")}
            options |= _WITHOUT_CUDA
        if key != "workers" or not on_cuda:
            options |= _BY_RANGE
        options |= as_text(settings.options)
        if "capture-range" in options:
            options.setdefault("capture-range-end", f"repeat-shutdown:{captures}")
        options.setdefault("o", f"{output}_%h_%p")
        _check(options)
        return options

    def command(self, options: Options) -> list[str]:
        return ["nsys", "profile", *_argv(options)]

    def ray_nsight(self, options: Options) -> dict[str, str] | None:
        return dict(options)

    def check_node(
        self, options: Mapping[str, Options], path: str | None = None
    ) -> tuple[list[str], str]:
        path = _agent_path() if path is None else path
        nvtx = version_of("nvtx")
        problems: list[str] = []
        if nvtx is None:
            problems.append(f"nvtx is not installed for {sys.executable}. Run: pip install nvtx")
        nsys = shutil.which("nsys", path=path)
        if nsys is None:
            found = shutil.which("nsys")
            problems.append(
                f"nsys is at {found}, but not on the PATH that Ray was started with there. Add its "
                "folder to PATH before `ray start`."
                if found
                else "nsys is not on the PATH that Ray was started with. Install Nsight Systems there "
                "and start Ray again, or use profiler.nsight.tool=torch, which needs no nsys."
            )
            return problems, ""
        # The PATH of a captured process, see `actor_placement.runtime_env_for`.
        path = f"{os.path.dirname(sys.executable)}{os.pathsep}{path}"
        _, version = _run(path, nsys, "--version")
        if _run(path, "python", "-c", "import ray")[0]:
            problems.append(
                "`python` on PATH cannot import ray, and Ray starts workers under nsys by that "
                f"name: they would never start. Put {sys.executable}'s folder first on PATH."
            )
        program = [sys.executable, "-c", _PROBE_NVTX if nvtx else ""]
        tried: dict[tuple[str, ...], tuple[int, str]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for role, given in options.items():
                argv = tuple(_argv({key: value for key, value in given.items() if key != "o"}))
                if argv not in tried:
                    output = f"{folder}/{len(tried)}"
                    # nsys itself fails sometimes on a busy machine; Ray tries three times too.
                    for _ in range(_PROBE_TRIES):
                        tried[argv] = _run(path, nsys, "profile", *argv, "-o", output, *program)
                        if tried[argv][0] in (0, _TIMED_OUT):
                            break
                status, printed = tried[argv]
                if status:
                    problems.append(f"nsys fails with the options for {role}: {printed[-300:]}")
        starts = {given.get("capture-range") for given in options.values()}
        silent = any("domain DummyDomain" in printed for _, printed in tried.values())
        if silent and _RANGE_START in starts:
            problems.append(
                f"nvtx {nvtx} records no range under {version}, without any message. Use a newer nsys, "
                "or pip install 'nvtx==0.2.11' matplotlib."
            )
        return problems, version

    def check_machine(self) -> Iterator[MachineCheck]:
        path = shutil.which("nsys")
        if path is None:
            nothing = "not on PATH: events are recorded, captures are not possible"
            yield MachineCheck("nsys", True, nothing)
            return
        options = {"trainer": _WITHOUT_CUDA | _BY_RANGE}
        problems, version = self.check_node(options, os.environ["PATH"])
        message = f"{version or 'unknown version'} at {path}"
        yield MachineCheck("nsys", not problems, message, "", tuple(problems))

    def start(self, capture: RoleCapture) -> Any:
        start = capture.options.get("capture-range")
        if start == _RANGE_START:
            nvtx: Any = importlib.import_module("nvtx")
            return nvtx.start_range(message=_RANGE, domain=NVTX_DOMAIN)
        if start == _CUDA_START:
            import torch

            if torch.cuda.is_available():
                # The probe of this function records the capture.
                torch.cuda.profiler.start()
        return None

    def stop(self, handle: Any, path: Path) -> None:  # noqa: ARG002
        if handle is STARTED_BY_HOST:
            sys.modules["torch"].cuda.profiler.stop()
        else:
            sys.modules["nvtx"].end_range(handle)

    def report_names(self, process: str, number: int) -> Iterator[str]:
        yield from super().report_names(process, number)
        # nsys leaves the number out when only one capture was announced.
        if number == 1:
            yield f"{process}{self.suffix}"

    def export(self, report: Path) -> Path:
        """Convert a report to SQLite beside it, unless that is there already."""
        target = report.with_suffix(".sqlite")
        if target.exists() and target.stat().st_mtime >= report.stat().st_mtime:
            return target
        nsys = shutil.which("nsys")
        if nsys is None:
            raise ReadingError(
                "nsys is not on PATH, and only nsys can read its reports.\nExport them where it is: "
                f"nsys export --type sqlite -o {target} {report}",
                "no-nsys",
            )
        command = [nsys, "export", "--type", "sqlite", "--force-overwrite=true", "-q", "true"]
        done = subprocess.run(  # noqa: S603
            [*command, "-o", str(target), str(report)], capture_output=True, text=True, check=False
        )
        if done.returncode or not target.exists():
            printed = (done.stderr or done.stdout).strip()[-300:]
            raise ReadingError(
                f"nsys cannot export {report}: {printed}\nA newer nsys reads older reports; an older "
                "one does not read newer ones.",
                "no-nsys",
            )
        return target


def as_text(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options as Ray takes them: text, lower-case true and false; None is left out."""
    return {
        str(key): str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in options.items()
        if value is not None
    }


def _argv(options: Options) -> list[str]:
    """Return options as command-line arguments, the way Ray writes them."""
    argv: list[str] = []
    for key, value in options.items():
        argv += [f"--{key}={value}"] if len(key) > 1 else [f"-{key}", value]
    return argv


def _on_cuda(config: Any) -> bool:
    from omegaconf import OmegaConf

    # What verl 0.9 calls CUDA's platform.
    if os.environ.get("VERL_PLATFORM", "nvidia") != "nvidia":
        return False
    return (OmegaConf.select(config, "trainer.device") or "cuda") == "cuda"


def _check(options: Options) -> None:
    """Refuse what Ray would break: it joins the options unquoted, for a shell."""
    for name, value in options.items():
        if name == "output":
            raise ConfigError(
                "profiler.nsight.options.output: Ray gives nsys a second -o, which nsys "
                "rejects.\nUse the key o instead, or profiler.nsight.directory for the folder.",
                "nsys-option",
            )
        if not re.fullmatch(r"[\w./:,=@%+{}-]*", value):
            where = (
                f"The folder of the reports, {value!r},"
                if name == "o"
                else f"profiler.nsight.options.{name} is {value!r}, which"
            )
            raise ConfigError(
                f"{where} has characters that do not survive the shell in which Ray starts nsys.\n"
                "Use letters, digits and ._/-:,=@% only; profiler.nsight.directory=DIR sets "
                "another folder.",
                "nsys-option",
            )


def version_of(package: str) -> str | None:
    """Return the version of an installed package."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _agent_path() -> str:
    """Return the PATH of the parent process.

    Ray's agent starts nsys with the environment of the raylet, not of the job.
    """
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        entries = []
    for entry in entries:
        if entry.startswith(b"PATH="):
            return os.fsdecode(entry[len(b"PATH=") :])
    return os.environ.get("PATH", "")


def _run(path: str, *argv: str) -> tuple[int, str]:
    """Return exit status and output of a command; a negative status if it did not end by itself."""
    try:
        done = subprocess.run(  # noqa: S603
            argv,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
            env={**os.environ, "PATH": path},
        )
    except subprocess.TimeoutExpired:
        return _TIMED_OUT, (
            f"it did not end within {_PROBE_TIMEOUT_S} s (a container may need sample=none and "
            "cpuctxsw=none)"
        )
    except OSError as error:
        return -1, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


TOOL = _Nsys()
