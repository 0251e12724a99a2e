"""The documented JSON is what commands print, column by column."""

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from cached_runs import REHEARSED
from json_format import FORMATS, schema

from verl_profiler.cli import main

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"


def printed(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main([*map(str, words)])
    return out.getvalue()


@pytest.fixture(scope="module")
def outputs():
    """What each documented command prints about a recorded run, read once."""
    found = json.loads(printed("requests", REHEARSED, "--slowest", 1, "--json"))
    first = found["requests"][0]["request_id"]
    log = DATA / "console_logs" / "verl-0.9.1-real.log"
    texts = {
        "summary": printed("summary", REHEARSED, "--json"),
        "summary LOG": printed("summary", log, "--json"),
        "why": printed("why", REHEARSED, "--json"),
        "requests": printed("requests", REHEARSED, "--json"),
        "requests --request": printed("requests", REHEARSED, "--request", first, "--json"),
        "plot": printed("plot", "all", REHEARSED, "--steps", "1:2", "--json"),
        "diff": printed("diff", f"{REHEARSED}@1", f"{REHEARSED}@2", "--json"),
        "diff --verify": printed("diff", "--verify", "polling", REHEARSED, REHEARSED, "--json"),
        "timing": printed("timing", log, "--json"),
        "stuck": printed("stuck", REHEARSED, "--json"),
        "tq": printed("tq", REHEARSED, "--json"),
        "memory": printed("memory", REHEARSED, "--json"),
        "runs": printed("runs", REHEARSED, "--json"),
    }
    return {command: json.loads(text) for command, text in texts.items()}


def test_the_output_holds_to_its_schema(outputs):
    """With every key, and no other."""
    assert {*FORMATS} == {*outputs}
    for command, content in outputs.items():
        jsonschema.Draft202012Validator.check_schema(schema(command))
        jsonschema.validate(content, schema(command))


def test_the_commands_of_the_skill_run(outputs):
    """With jq, as they are written; every key that the text names exists."""
    jq = shutil.which("jq")
    if jq is None:
        pytest.skip("no jq is installed")
    text = (ROOT / "docs" / "skill" / "SKILL.md").read_text()
    first = outputs["requests"]["requests"][0]["request_id"]
    words = {
        "RUN": str(REHEARSED), "BEFORE": f"{REHEARSED}@1", "AFTER": f"{REHEARSED}@2", "ID": first,
        "FINDING": "polling",
    }  # fmt: skip
    commands = [
        line.strip() for line in text.splitlines() if re.match(r" {6,}(verl-profiler|jq) ", line)
    ]
    assert len(commands) == 9
    for command in commands:
        filled = re.sub(r"\b[A-Z]+\b", lambda match: words.get(match[0], match[0]), command)
        filled = filled.replace("step_3", "step_1").replace("--step 3", "--step 1")
        filled = filled.replace("duration_sec > 1", "duration_sec > 0.1")
        if "verify" in filled:
            filled = filled.replace(f"{REHEARSED}@1 {REHEARSED}@2", f"{REHEARSED} {REHEARSED}")
        ours, _, theirs = filled.partition(" | ")
        content = ""
        if ours.startswith("verl-profiler"):
            content, theirs = printed(*shlex.split(ours)[1:]), theirs or "cat"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", theirs or filled],
            input=content, capture_output=True, text=True, check=False, timeout=200,
        )  # fmt: skip
        assert not done.stderr, (filled, done.stderr)
        assert done.stdout.strip() not in ("", "null", "[]"), filled
    finding = outputs["summary"]["findings"][0]
    assert {"message", "recoverable_s", "low_s", "high_s", "culprit_kind", "culprit_text"} <= set(
        finding
    )
    assert {"where", "evidence", "overrides"} <= set(finding)
