"""The documented JSON is what commands print, column by column."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_profiler.cli import main
from verl_profiler.cli.json_format import FORMATS, schema, table_docs
from verl_profiler.views.columns import described

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
# Not answers of an analysis: findings and the path's inner tables, which docs/findings.md explains.
OTHER_PAGES = {"findings", "culprits", "steady_path"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from recorded import unpacked

    return unpacked(tmp_path_factory.mktemp("json"))


@pytest.fixture(scope="module")
def outputs(run):
    """What each documented command prints about a recorded run, read once."""
    import contextlib
    import io

    def printed(*words):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            main([*map(str, words)])
        return json.loads(out.getvalue())

    first = printed("requests", run, "--slowest", 1, "--json")["requests"][0]["request_id"]
    log = DATA / "console_logs" / "verl-0.9.1-real.log"
    return {
        "summary": printed("summary", run, "--json"),
        "summary --worker": printed("summary", run, "--worker", "worker_0", "--json"),
        "why": printed("why", run, "--json"),
        "requests": printed("requests", run, "--json"),
        "requests --request": printed("requests", run, "--request", first, "--json"),
        "plot": printed("plot", "all", run, "--steps", "1:2", "--json"),
        "diff": printed("diff", f"{run}@1", f"{run}@2", "--json"),
        "diff --verify": printed("diff", "--verify", "polling", run, run, "--json"),
        "timing": printed("timing", log, "--json"),
        "stuck": printed("stuck", run, "--json"),
        "tq": printed("tq", run, "--json"),
        "memory": printed("memory", run, "--json"),
    }


@pytest.mark.parametrize("command", FORMATS)
def test_the_output_holds_to_its_schema(outputs, command):
    """With every key, and no other."""
    jsonschema.Draft202012Validator.check_schema(schema(command))
    jsonschema.validate(outputs[command], schema(command))


def test_every_column_of_every_table_is_described(outputs):
    """In the views, which the page repeats."""
    documented = table_docs()
    missing = {}
    for content in outputs.values():
        tables = dict(content.get("tables", {}))
        for plot, sheets in content.get("plots", {}).items():
            # The plot of this name draws rows of another analysis.
            of_others = {"slowest_requests"} & {plot}
            tables |= {
                "request_breakdown" if name in of_others else name: rows
                for name, rows in sheets.items()
                if name in documented
            }
        for name, rows in tables.items():
            if name in OTHER_PAGES:
                continue
            for column in {column for row in rows for column in row}:
                try:
                    described(documented[name][1], [column])
                except KeyError:
                    missing.setdefault(name, []).append(column)

    assert missing == {}, missing


def test_the_commands_of_the_skill_run(run, outputs, tmp_path):
    """With jq, as they are written; every key that the text names exists."""
    jq = shutil.which("jq")
    if jq is None:
        pytest.skip("no jq is installed")
    text = (ROOT / "docs" / "skill" / "SKILL.md").read_text()
    first = outputs["requests"]["requests"][0]["request_id"]
    words = {
        "RUN": str(run), "BEFORE": f"{run}@1", "AFTER": f"{run}@2", "ID": first,
        "FINDING": "polling", "N": "1",
    }  # fmt: skip
    commands = [
        line.strip() for line in text.splitlines() if re.match(r" {6,}(verl-profiler|jq) ", line)
    ]
    assert len(commands) == 9
    for command in commands:
        filled = re.sub(r"\b[A-Z]+\b", lambda match: words.get(match[0], match[0]), command)
        filled = filled.replace("step_N", "step_1").replace(
            "duration_sec > 1", "duration_sec > 0.1"
        )
        if "verify" in filled:
            filled = filled.replace(f"{run}@1 {run}@2", f"{run} {run}")
        main_words = f"{shlex.quote(sys.executable)} -m verl_profiler"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", filled.replace("verl-profiler", main_words, 1)],
            capture_output=True, text=True, check=False, timeout=200,
        )  # fmt: skip
        assert not done.stderr, (filled, done.stderr)
        assert done.stdout.strip() not in ("", "null", "[]"), filled
    finding = outputs["summary"]["findings"][0]
    assert {"message", "recoverable_s", "low_s", "high_s", "culprit_kind", "culprit_text"} <= set(
        finding
    )
    assert {"where", "evidence", "overrides"} <= set(finding)
