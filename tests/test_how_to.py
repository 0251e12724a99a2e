"""Blocks of code in the pages can be pasted: shell, YAML, Python, Hydra overrides, commands."""

import ast
import gzip
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from verl_profiler import cli
from verl_profiler.views.questions import VIEWS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# `…` stands for the rest of a command; a sourced file and a variable of the page's text are the reader's.
SHELLCHECK = ("--shell=bash", "--exclude=SC1091,SC2154,SC2164")


def blocks(page, language):
    """Return the fenced blocks of a language, without the indentation of their list items."""
    fence = rf"^( *)```{language}\n(.*?)^ *```$"
    found = re.findall(fence, page.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, text in found]


def shell_lines(page):
    """Yield the command lines of a page's shell blocks and of its indented blocks."""
    text = page.read_text()
    indented = re.findall(
        r"(?:^    +\S.*\n)+", re.sub(r"(?ms)^ *```.*?^ *```$", "", text), re.MULTILINE
    )
    for block in [*blocks(page, "bash"), *map(textwrap.dedent, indented)]:
        yield from block.replace("\\\n", " ").splitlines()


def argvs(page):
    """Yield the arguments of each `verl-profiler` command of a page."""
    for line in shell_lines(page):
        if "verl-profiler " not in line or "[-" in line:
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;<>"):
                if words[:1] == ["verl-profiler"]:
                    yield [each for each in words[1:] if each != "…"]
                words = []
            else:
                words.append(word)


def test_shell_blocks_can_be_pasted():
    """No syntax error; no unquoted variable, where shellcheck is installed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=path)
    checkers = [["bash", "-n"], *([[shellcheck, *SHELLCHECK, "-"]] if shellcheck else [])]
    wrong = []
    for page in PAGES:
        for script in blocks(page, "bash"):
            for checker in checkers:
                done = subprocess.run(
                    checker, input=script, capture_output=True, text=True, check=False
                )
                wrong += [(page.stem, done.stdout + done.stderr)] if done.returncode else []

    assert [] == wrong


def test_the_command_line_accepts_every_command_of_the_pages():
    """Its options exist, and every command is in a page."""
    refused, found = [], set()
    for argv in (argv for page in PAGES for argv in argvs(page) if argv):
        found.add(argv[0])
        try:
            cli.parsed(argv)
        except SystemExit as end:
            if end.code:
                refused.append(argv)

    assert [] == refused
    assert {*cli.COMMANDS} <= found


def test_yaml_and_python_blocks_can_be_read():
    """As every parser reads them; and what they import of this package is there."""
    yaml = pytest.importorskip("yaml")
    wrong = []
    for page in PAGES:
        for text in blocks(page, "yaml"):
            assert yaml.safe_load(text), page
        for text in blocks(page, "python"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("verl_profiler"):
                    module = importlib.import_module(node.module)
                    names = [name.name for name in node.names]
                    wrong += [(page.stem, name) for name in names if not hasattr(module, name)]

    assert [] == wrong


def trainer_commands():
    """Yield page and overrides of each training command of the pages, variables filled in.

    A training command is one of `main_ppo`, a rehearsal, or a line of overrides alone.
    """
    yaml = pytest.importorskip("yaml")
    for page in PAGES:
        lines = list(shell_lines(page))
        for text in blocks(page, "yaml"):
            read = yaml.safe_load(text)
            if isinstance(read, dict) and "spec" in read:
                lines.append(read["spec"]["entrypoint"])
        for line in lines:
            # The trainers of verl.experimental have configs of their own.
            command = re.search(
                r"verl.trainer.main_ppo|train\.sh|verl-profiler rehearse(?!.* async_)", line
            )
            if command or re.match(r"[a-z_]+(\.\w+)+=\S+$", line):
                after = line[command.end() :] if command else line
                words = shlex.split(re.sub(r"\$\{?\w+\}?", "1", after), comments=True)
                overrides = [word for word in words if re.match(r"[+a-z]\S*=", word)]
                rehearsal = ["+rehearsal=standin"] if command and "rehearse" in command[0] else []
                yield page.stem, [*rehearsal, *overrides]


@pytest.mark.verl
def test_the_overrides_of_the_pages_compose():
    """With verl's own config and this package's option."""
    hydra = pytest.importorskip("hydra")
    pytest.importorskip("verl")
    found = list(trainer_commands())
    # Those that add the same groups at once: values are not checked.
    added = {}
    for _, words in found:
        groups = tuple(word for word in words if word.startswith("+"))
        added.setdefault(groups, {}).update((word.partition("=")[0], word) for word in words)
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        for groups, words in added.items():
            config = hydra.compose("ppo_trainer", overrides=[*words.values()])
            assert ("profiler" in config) == any("+profiler=" in each for each in groups)

    pages = {page for page, _ in found}
    assert {"README", "api", "captures", "clusters", "memory-saver", "rehearsal"} <= pages


# What needs Ray, a receiver, nsys, standard input or a training is run by tests of its own; so is `plot all`.
ELSEWHERE = {"rehearse", "check", "trackers", "--endpoint", "--export", "--ray", "--on", "all", "-"}
RECORDED = ROOT / "tests/data"
TUTORIAL = ROOT / "examples/tutorial"
# The recorded runs that names in the pages stand for.
RUNS = {
    **dict.fromkeys(("base", "base-1", "last-week"), "before"),
    **dict.fromkeys(("old", "before", "today", "new-1", "verl-4711"), "after"),
    **dict.fromkeys(("after", "new", "base-2"), "fixed"),
    **dict.fromkeys(("rehearsal", "new-2"), "rehearsal_run"),
}
# Options of which each command has tests: they select or format what is read and printed all the same.
SELECTED = re.compile(r"\0(--json|-v|--spec|--wait|--lang\0\w+|--(step|slowest)\0\w+)(?=\0|$)")
PLACEHOLDERS = {
    "logs": ".",
    "RUN": "logs/my-run",
    "BEFORE": "logs/before",
    "AFTER": "logs/after",
    "FINDING": "event_loop",
    "ID": "eb91107f03984b54b70ad184c848cd5f",
    "my-run.tar.gz": str(TUTORIAL / "after.tar.gz"),
    "examples/tutorial/after.tar.gz": str(TUTORIAL / "after.tar.gz"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder with recorded runs, and logs under the names in the pages."""
    folder = tmp_path_factory.mktemp("pages")
    for archive in (
        *TUTORIAL.glob("*.tar.gz"),
        RECORDED / "rehearsal_run.tar.gz",
        RECORDED / "separate_async_run.tar.gz",
    ):
        shutil.unpack_archive(archive, folder)
    for name in ("train", "before", "after"):
        shutil.copy(RECORDED / "console_logs/verl-0.9.1-real.log", folder / f"{name}.log")
    shutil.copy(RECORDED / "tq/console.log.gz", folder / "node-1.log.gz")
    (folder / "training.log").write_bytes(gzip.decompress((folder / "node-1.log.gz").read_bytes()))
    return folder


def reading_commands():
    """Return the commands of the pages that read a run or a log, one of those that differ in names alone.

    Those of the tutorial, which are of archives, are run by `test_docs`.
    """
    found = {}
    for page in (each for each in PAGES if not each.name.startswith("tutorial")):
        my_run = "separate_async_run" if page.stem == "asynchronous" else "after"
        runs = {"my-run": my_run, **RUNS}
        for argv in argvs(page):
            if argv and not ELSEWHERE & {*argv} and "://" not in " ".join(argv):
                words = [PLACEHOLDERS.get(word, word) for word in argv if word != "--open"]
                text = "\0".join(words).replace("node-*", "node-1").replace("/var/lib/", "")
                for name, run in runs.items():
                    text = re.sub(rf"(logs|/runs)/{name}(?![\w-])", run, text)
                words = text.replace("node_exporter/", "").split("\0")
                assert words[0] != "plot" or words[1].startswith("-") or words[1] in VIEWS
                shape = "\0".join(["plot", *words[2:]] if words[0] == "plot" else words)
                shape = re.sub(rf"{'|'.join(map(re.escape, set(runs.values())))}|\d+", "RUN", shape)
                shape = SELECTED.sub("", shape)
                found.setdefault(shape, words)
    return sorted(found.values())


def test_the_commands_of_the_pages_that_read_a_run_succeed(recorded, monkeypatch, capsys):
    """In this process; 1 is an answer of a comparison."""
    pytest.importorskip("vl_convert")
    monkeypatch.chdir(recorded)
    failed = []
    for argv in reading_commands():
        status = cli.main([*argv])
        error = capsys.readouterr().err
        failed += [(argv, error)] if status > (argv[0] == "diff") else []

    assert [] == failed


def test_the_jq_and_grep_lines_of_the_pages_find_something(recorded):
    """In the event files and in a console log; the event of CONTRIBUTING.md is made up."""
    if shutil.which("jq") is None:
        pytest.skip("no jq is installed")
    lines = {
        re.sub(r"logs/my-run|\bRUN\b", "after", line.split("  #")[0])
        for page in PAGES
        for line in shell_lines(page)
        if re.match("jq -c|grep", line) and page.name != "CONTRIBUTING.md"
    }
    found = {
        line: subprocess.run(["bash", "-c", line], cwd=recorded, capture_output=True, check=False)
        for line in lines
    }

    assert len(lines) >= 3
    assert [] == [line for line, done in found.items() if done.returncode or not done.stdout]
