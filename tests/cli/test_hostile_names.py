"""Every command on a run whose every name does what a terminal would obey; held on raw bytes."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from hostile_names import TOKEN, hostile_log, hostile_run, printed_by

from verl_profiler.cli import main

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """What stands for each word of a command line."""
    folder = tmp_path_factory.mktemp("hostile")
    run = hostile_run(folder)
    again = folder / f"again{TOKEN.replace('/', '')}"
    shutil.copytree(run, again)
    log = hostile_log(DATA / "console_logs" / "verl-0.9.1-real.log", folder / f"{run.name}.log")
    memory = folder / f"memory{run.name}.log"
    memory.write_text(
        "step:1 - timing_s/step:1.0\n"
        f"Before {TOKEN.splitlines()[0]}, memory allocated (GB): 1.00, memory reserved (GB): 2.00\n"
        "step:2 - timing_s/step:1.0\n"
    )
    tq = folder / f"tq{run.name}.log"
    (folder / "tq.log").write_bytes(gzip.decompress((DATA / "tq" / "console.log.gz").read_bytes()))
    hostile_log(folder / "tq.log", tq)
    names = {"AGAIN": again, "LOG": log, "MEMORY": memory, "TQ": tq}
    below = {
        name: folder / f"{name.lower()}{TOKEN.replace('/', '')}" for name in ("OUT", "NOWHERE")
    }
    return {**names, **below, "RUN": run, "EVIL": f"evil{TOKEN}"}


# Command lines by their words, one of each way to print; the status that they end with.
WORDS = [
    ("summary RUN", 0),
    ("summary RUN --json", 0),
    ("summary NOWHERE", 2),
    ("report RUN --out OUT/report.html", 0),
    ("requests RUN --request 31d0b664", 0),
    ("plot tool_latencies RUN --csv", 0),
    ("plot tool_latencies RUN AGAIN --out OUT", 0),
    ("stuck RUN", 0),
    ("diff RUN AGAIN --all", 0),
    ("diff RUN AGAIN --fail-if EVIL", 2),
    ("summary --follow RUN", 0),
    ("timing LOG --output-dir OUT/timing", 0),
    ("tq TQ", 0),
    ("memory MEMORY", 0),
    ("export prometheus RUN", 0),
    ("export perfetto RUN --out OUT/timeline.pftrace", 0),
    ("collect RUN", 1),
    ("check --output-dir NOWHERE", None),
    ("rehearse --print-command --output NOWHERE EVIL", 0),
    ("EVIL", 2),
]


@pytest.mark.parametrize(
    ("words", "expected"), WORDS, ids=[f"{words} ({status})" for words, status in WORDS]
)
def test_no_name_reaches_the_terminal_as_it_is(words, expected, places, capfdbinary, monkeypatch):
    """Neither what a terminal obeys nor a line that is not ours, on stdout and stderr."""
    # Some lines name no output: it belongs beside the run, not into the tree.
    monkeypatch.chdir(places["RUN"].parent)
    arguments = []
    for word in words.split():
        name, *below = word.split("/")
        name, at, steps = name.partition("@")
        place = places.get(name, name)
        arguments.append("/".join([f"{place}{at}{steps}", *below]))
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    out, err = capfdbinary.readouterr()

    assert [] == printed_by(out)
    assert [] == printed_by(err)
    if expected is not None:
        assert expected == status, err.decode()
    if "--json" in words and expected == 0:
        json.loads(out)
    if words in SHOWN:
        assert b"x1b[2J" in out or b"u001b[2J" in out, (
            "the test's names are not in what it looks at"
        )


# What shows names for certain.
SHOWN = {
    "summary RUN",
    "summary RUN --json",
    "requests RUN --request 31d0b664",
    "plot tool_latencies RUN --csv",
    "summary --follow RUN",
    "tq TQ",
    "export prometheus RUN",
}
