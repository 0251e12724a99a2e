"""What importing each half brings into a process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_profiler.environ import SETTINGS
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig

LOG = str(Path(__file__).parent / "data/console_logs/verl-0.7-megatron.log")
READING = {"duckdb", "vl_convert", "jinja2", "pandas", "numpy", "scipy"}
HOSTS = {"torch", "ray", "verl", "sglang", "vllm", "transfer_queue", "hydra", "omegaconf"}


def imported_by(statement, **environment):
    """Return the top-level modules that a statement brings in, beyond what Python starts with."""
    code = (
        "import sys, json; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted({m.partition('.')[0] for m in set(sys.modules) - before})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_recording_half_brings_in_none_of_the_reading_half(tmp_path):
    """Also when it records, with every probe registered."""
    worker_config = WorkerConfig(str(tmp_path), "x", EventSettings(), take_anchor())
    found = imported_by(
        "import verl_profiler.plugin; import verl_profiler.recording.recorder as r; assert r.active()",
        **{SETTINGS: worker_config.encode()},
    )

    assert {"wrapt", "msgspec"} <= found
    assert set() == found & (READING | HOSTS)


@pytest.mark.parametrize(
    "statement",
    [
        # In a notebook.
        "import verl_profiler",
        # verl imports the plugin in every run of the environment, SGLang calls it in every engine.
        "import verl_profiler.plugin as p; assert p.activate() is False",
        "from verl_profiler.instrumentation.sglang_scheduler import load; load()",
    ],
)
def test_a_process_that_is_not_profiled_imports_nothing_and_starts_nothing(statement):
    """Without settings nothing is patched either."""
    found = imported_by(f"{statement}\nimport threading; assert threading.active_count() == 1")

    assert "VERL_PROFILER_SETTINGS" == SETTINGS
    assert {"verl_profiler"} == found & {*READING, *HOSTS, "verl_profiler", "wrapt", "msgspec"}


@pytest.mark.parametrize(
    ("modules", "left_out"),
    [
        # A laptop is enough.
        (["reading.reader", "views.overview_text", "reading.formats.tq_log", "exports.jsonl"], HOSTS | {"wrapt"}),
        # Tables, the list of plots and the report need no plots.
        (["analysis", "views.questions", "views.sections"], {*HOSTS, "wrapt", "vl_convert", "jinja2"}),
        # Masking, for example, is done in the driver and in the report.
        (["events.redaction", "nodes.actor"], {*READING, *HOSTS, "wrapt", "msgspec"}),
    ],
)  # fmt: skip
def test_what_a_part_does_not_need_is_not_imported(modules, left_out):
    """Together: whichever of them brings it in."""
    found = imported_by("; ".join(f"import verl_profiler.{module}" for module in modules))

    assert set() == found & left_out


@pytest.mark.parametrize(
    "words", [["--help"], ["summary", LOG], ["why", LOG], ["timing", "--json", LOG]]
)
def test_the_command_line_needs_only_the_core(words):
    """`--help` and `check` work on a training node; a log is answered at once."""
    found = imported_by(
        "import contextlib, io, verl_profiler.cli as cli\n"
        f"with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): cli.main({words})"
    )

    assert set() == found & (READING | HOSTS)
