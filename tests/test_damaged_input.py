"""Damaged input of each format: a problem line or a plain error, and what is whole is still read.

Mutations and checks are those of `benchmarks/fuzz.py`, here per format, seeded, and in this process.
"""

import contextlib
import gzip
import json
import shutil
import tempfile
from pathlib import Path

import fuzz
import fuzz_mutations
import msgspec
import pytest
from hostile import paths_of, text_with
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_profiler.cli import main
from verl_profiler.reading.formats.console_memory import read_logs as read_memory
from verl_profiler.reading.formats.console_steps import logged_runs
from verl_profiler.reading.formats.foreign_traces import read_trace
from verl_profiler.reading.formats.tq_log import read_logs as read_transfers
from verl_profiler.reading.reader import load

# What reads the files that a mutation changes, and how many examples there are on each push.
READERS = {
    "lines": (2, ["requests RUN --json", "stuck RUN -v"]),
    "long_line": (1, ["requests RUN"]),
    "whole_file": (2, ["requests RUN", "tq RUN"]),
    "compressed": (1, ["requests RUN"]),
    "json_file": (2, ["requests RUN", "stuck RUN -v"]),
    "file_kind": (3, ["stuck RUN -v", "memory LOG"]),
    "file_name": (1, ["stuck RUN"]),
    "folder_name": (1, ["requests RUN"]),
    "parent_name": (1, ["requests RUN"]),
    "cache": (2, ["requests RUN"]),
    "parquet": (1, ["requests RUN"]),
    "archive": (2, ["requests RUN"]),
    "console": (4, ["timing LOG --json", "memory LOG --json", "tq LOG --json"]),
    "torch_trace": (1, ["export perfetto RUN -o OUT"]),
    "nsys": (1, ["export perfetto RUN -o OUT"]),
}
# What changes values of events; all tables are made of these.
VALUES = ("lines", "long_line", "whole_file", "json_file")
# What changes nothing that is read for events.
BESIDE = ("console", "torch_trace", "nsys")
MUTATIONS = {each.__name__: each for each in (*fuzz_mutations.MUTATIONS, *fuzz_mutations.LAST)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run with one of everything, and the tables that a reader kept of it."""
    fuzz.prepare(tmp_path_factory.mktemp("base") / "made")
    return next(tmp_path_factory.getbasetemp().glob("base*/made/base-cached"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", sorted(MUTATIONS.keys() - {"many_names"}))
def test_damage_is_named_and_costs_nothing_else(base, name):
    """No traceback, no control character, no lost event; nothing else is written."""
    examples, commands = READERS[name]

    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(chance=st.randoms(use_true_random=True))
    def check(chance):
        with tempfile.TemporaryDirectory() as folder:
            mutant = fuzz_mutations.Mutant(Path(folder), base)
            MUTATIONS[name](mutant, chance)
            places = {"RUN": mutant.target, "LOG": mutant.log, "OUT": mutant.folder / "out"}
            words = [str(places.get(word, word)) for word in chance.choice(commands).split()]
            wrong = [*fuzz.run_command(words)]
            if name not in BESIDE:
                wrong += fuzz.compare_events(mutant, name == "cache", derived=name in VALUES)

            assert [] == wrong
            for path, content in mutant.canaries.items():
                assert path.read_text() == content
            assert not Path("/tmp/verl_profiler_fuzz_outside.json").exists()

    check()


def variants(content, *, each=1, parse=json.loads):
    """Return the text of an object with a token of JSON in the place of each of its values."""
    texts = []
    for path in list(paths_of(content))[1:]:
        for token in fuzz_mutations.TOKENS:
            text = text_with(content, path, token)
            with contextlib.suppress(ValueError, msgspec.DecodeError):
                parse(text)
                texts.append(text)
    return texts[::each]


@pytest.mark.timeout(120)
def test_any_value_in_any_place_costs_its_own_row(base, tmp_path):
    """Of headers, of the list of captures and of the events of a trace: what is good beside it is read."""
    run = Path(shutil.copytree(base, tmp_path / "run", ignore=shutil.ignore_patterns(".cache")))
    header = json.loads((run / "processes" / "worker_0.json").read_text())
    for number, text in enumerate(variants(header, each=11)):
        (run / "processes" / f"other_{number}.json").write_text(text)
    captures = json.loads((run / "nsight" / "captures.json").read_text())
    listed = [json.dumps(captures[0]), *variants(captures[0]), json.dumps(captures[1])]
    (run / "nsight" / "captures.json").write_text(f"[{', '.join(listed)}]")
    path = run / "nsight" / "actor_0.step2.json.gz"
    good = read_trace(path)
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events = trace.pop("traceEvents")
    texts = [json.dumps(event) for event in events]
    for event in {event["ph"]: event for event in events}.values():
        # A number that is out of range costs the whole file.
        texts += variants(event, parse=msgspec.json.decode)
    text = json.dumps({**trace, "traceEvents": []})[:-2] + ", ".join(texts) + "]}"
    path.write_bytes(gzip.compress(text.encode()))

    damaged = read_trace(path)
    assert good.threads.keys() <= damaged.threads.keys()
    assert damaged.left_out > 100
    assert 0 == main(["summary", "--follow", str(run)])
    assert 0 == main(["export", "perfetto", str(run), "-o", str(tmp_path / "out")])
    with load(run, cache=False) as opened:
        assert {"nsys", "torch"} <= {row["tool"] for row in opened.rows("FROM captures")}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["run.jsonl", "run.parquet", "run.tar", "run.tar.zst", "a.log"])
def test_what_is_named_is_an_ordinary_file(tmp_path, capsys, name):
    """Pipes, devices, sockets, 10 GB of nothing, links to themselves, names that cannot be."""
    path = tmp_path / name
    command = "timing" if name == "a.log" else "requests"
    for kind in (*fuzz_mutations.KINDS[:-1], name):
        if kind not in ("/dev/stdin", "/dev/tty"):
            fuzz_mutations._replace_by(path, kind)
            assert main([command, str(path)]) in (1, 2), kind
            assert capsys.readouterr().err.count("\n") < 8
    for odd in ("a\0b", "n" * 300, "d/" * 3000, "\udcff\udcfe", "~", "~root"):
        assert [2, 2] == [main([command, odd]), main(["collect", odd])], odd


# An expression that backtracks would take minutes or years for some of their combinations.
BEFORE = ("", "step:1 - ", "step:1 - timing_s/gen:", "x, memory allocated (GB): ", "Task x (pid=1) ",
          "[TQ-LOG] x", "(", "\x1b[")  # fmt: skip
REPEATED = (" ", "\t", " - ", "a:", "a/", "A:", "A", "1", "(", "(a", "[", ".", ", ", "\r", "\0", ">",
            "\x1b[", "\x1b]", "0;", "[0;", "pid=", "step:1 - ", "(a pid=1) ", "[repeated ", "[TQ-TRACE] ",
            "| ", "2026-11-21 ", "len_samples=1 ", ", cost time: ",
            "[repeated 1x across cluster] (Ray deduplicates logs by default.",
            "x, memory allocated (GB): 1.5, memory reserved (GB): 2")  # fmt: skip
AFTER = ("", "m", " pid=7) pid=", "pid=1)", "[repeated 1x across cluster", "[TQ-LOG]", ":x",
         "x, memory allocated (GB): 1.5, memory reserved (GB): 2")  # fmt: skip
GOOD = "step:1 - timing_s/gen:1.5\nx, memory allocated (GB): 1.5, memory reserved (GB): 2\n"


@pytest.mark.timeout(120)
def test_no_line_of_a_log_takes_long(tmp_path):
    """4,000 blanks took `memory` 30 s once."""
    path = tmp_path / "console.log"
    lines = [
        before + repeated * (20_000 // len(repeated)) + AFTER[place % len(AFTER)]
        for place, repeated in enumerate(REPEATED)
        for before in BEFORE[place % 2 :: 2]
    ]
    path.write_text(GOOD + "\n".join(lines) + "\n" + GOOD.replace("step:1", "step:9"))

    memory, _ = read_memory([path])
    runs = logged_runs([path], [])
    read_transfers([path])

    assert {1, 9} <= {line.step for run in runs for line in run.lines}
    assert len(memory.rows("SELECT * FROM memory")) >= 2
