"""The docs know every message, setting, event, command and role that the code has."""

import ast
import gc
import importlib.util
import re
import tarfile
from pathlib import Path

import msgspec
import pytest
from cached_runs import REHEARSED
from console_blocks import replayed

from verl_profiler.capture.plan import NsightSettings
from verl_profiler.cli import COMMANDS, main
from verl_profiler.events.vocabulary import EVENTS, FAMILIES
from verl_profiler.launch.settings import MemorySaverSettings, Settings
from verl_profiler.recording.worker_config import EventSettings
from verl_profiler.transfer_queue.switches import TracingSettings
from verl_profiler.views.questions import VIEWS

ROOT = Path(__file__).parents[1]
SOURCES = [
    file for file in (ROOT / "verl_profiler").rglob("*.py") if "import-path" not in file.parts
]
DOCS = "\n".join(file.read_text() for file in sorted((ROOT / "docs").rglob("*.md")))


def parsed(text):
    """Parse with nothing in between: CPython 3.11 fails where a finalizer formats a traceback meanwhile.

    Both use the parser's one count of recursions (pytest#10763).
    """
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


def slugs_in_code():
    """Return the slugs that errors are raised with or that warnings end in."""
    found = set()
    for file in SOURCES:
        text = file.read_text()
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error"):
                words = [*node.args, *(keyword.value for keyword in node.keywords)]
                if len(words) == 2 and isinstance(words[1], ast.Constant):
                    found.add(words[1].value)
        found |= set(re.findall(r"\(([a-z]+(?:-[a-z]+)+)\)[\"\\]", text))
    return {slug for slug in found if isinstance(slug, str) and re.fullmatch(r"[a-z-]+", slug)}


def test_every_slug_has_an_entry_and_every_entry_a_slug():
    """Who searches for a message finds what to do."""
    page = (ROOT / "docs/messages.md").read_text()
    headings = re.findall(r"^### ([a-z, -]+)$", page, re.MULTILINE)
    documented = {slug for heading in headings for slug in heading.split(", ")}

    assert documented == slugs_in_code()


def test_every_setting_family_and_command_is_documented():
    """In the pages and above its line in the YAML, with the default that the code assumes."""
    omegaconf = pytest.importorskip("omegaconf")
    table = (ROOT / "docs/configuration.md").read_text()
    captures = (ROOT / "docs/captures.md").read_text()
    readme = (ROOT / "README.md").read_text()
    text = (ROOT / "configs/profiler/multiturn.yaml").read_text()
    said = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.create(text).profiler)
    missing = []
    for struct in (EventSettings, MemorySaverSettings, Settings, TracingSettings):
        names = [field.name for field in msgspec.structs.fields(struct)]
        missing += [name for name in names if name not in table]
        missing += [name for name in names if not re.search(rf"^ +{name}:", text, re.MULTILINE)]
    roles = [f"roles.{role}" for role in said["nsight"]["roles"]]
    names = [*(name for name in said["nsight"] if name != "roles"), *roles]
    missing += [name for name in names if f"`{name}`" not in captures]
    missing += [
        name for name in FAMILIES if f"    #   {name} " not in text or f"`{name}`" not in DOCS
    ]
    missing += [command for command in COMMANDS if f"verl-profiler {command}" not in readme]

    assert [] == missing
    groups = {
        "events": EventSettings,
        "memory_saver": MemorySaverSettings,
        "transfer_queue": TracingSettings,
        "nsight": NsightSettings,
    }
    for group, struct in groups.items():
        assert msgspec.json.decode(msgspec.json.encode(struct())) == said[group]


def generated():
    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs/generated.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_event_is_listed_under_its_category():
    """And the site's pages can be made, with every event and plot among them."""
    pytest.importorskip("duckdb")
    pages = generated().pages()
    text = (ROOT / "docs/events.md").read_text()
    for family in FAMILIES:
        names = [name for name, event in EVENTS.items() if event.family == family]
        assert f"| `{family}` | {', '.join(f'`{name}`' for name in names)} |\n" in text
        assert all(f"\n| `{name}`" in pages["fields.md"] for name in names)
    assert {f"\n## {name}\n" in pages["plots.md"] for name in VIEWS} == {True}


def test_links_between_pages_lead_somewhere():
    """To a file that exists and, where one is named, a heading in it."""
    pages = [*ROOT.glob("*.md"), ROOT / "benchmarks/README.md", *(ROOT / "docs").rglob("*.md")]
    broken = []
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                broken.append(f"{page.name}: {target}")
            elif anchor and file.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                anchors = {
                    re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                    for heading in headings
                }
                if anchor not in anchors:
                    broken.append(f"{page.name}: {target}")

    assert [] == broken


def test_every_named_plot_exists():
    """In the pages, and in what commands and findings advise."""
    text = "\n".join([DOCS, *(file.read_text() for file in SOURCES)])
    named = set(re.findall(r"(?:`|verl-profiler )plot ([a-z]\w*)", text))

    assert named - {"all"} <= VIEWS.keys()
    assert len(named) > 5


def test_no_text_of_the_program_points_into_a_clone():
    """Who installed it with pip has no docs folder; a command's docstring is its help."""
    pointing = []
    for file in SOURCES:
        tree = parsed(file.read_text())
        # A bare expression: a docstring.
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                helps = file.parent.name == "cli" and node is getattr(tree.body[0], "value", None)
                if (helps or id(node) not in docs) and re.search(
                    r"\b(docs|configs|examples|benchmarks)/", node.value
                ):
                    pointing.append(f"{file.name}: {node.value}")

    assert [] == pointing


LEFT = ("logs", "outputs", "build", "dist", "site")


def test_the_project_speaks_of_itself_alone():
    """No path of a machine, no host of a registry."""
    # What a rehearsal or a build left in the clone is not the project's; .venv has 100,000 files.
    tops = [top for top in ROOT.iterdir() if not top.name.startswith((".venv", ".git", *LEFT))]
    files = [
        file
        for pattern in ("*.md", "*.py", "*.yaml", "*.toml", "*.sh", "Makefile", "run")
        for top in tops
        for file in (top.rglob(pattern) if top.is_dir() else [top])
        if file.match(pattern)
    ]
    pattern = re.compile(r"/(?:work|root|home/\w+)/|pypi\.org|pytorch\.org/whl|files\.pythonhosted")

    found = {
        str(file.relative_to(ROOT)): match.group()
        for file in files
        if file != Path(__file__)
        for match in [pattern.search(file.read_text(errors="replace"))]
        if match
    }

    assert {} == found


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_examples_of_the_api_page_are_the_files_that_the_rehearsals_run():
    """So each of them has run with the real verl."""
    blocks = python_blocks("docs/api.md")
    for name in ("tools.py", "reward.py", "agent_loop.py", "sampler.py"):
        assert (ROOT / "examples/own_recipe" / name).read_text() in blocks


def test_the_other_examples_of_the_api_page_run(tmp_path, monkeypatch):
    """As they are written, one after the other."""
    monkeypatch.chdir(tmp_path)
    files = [file.read_text() for file in (ROOT / "examples/own_recipe").glob("*.py")]
    blocks = [block for block in python_blocks("docs/api.md") if block not in files]
    names = {"query": lambda _table: [1, 2, 3], "request_id": "r", "turn": 0}
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), names)

    lines = [file.read_text() for file in tmp_path.rglob("loader_*.jsonl")]
    assert len(blocks) == 4
    assert ['"read_file"' in line for line in lines] == [True]


def test_the_readme_is_short_and_shows_what_summary_prints(capsys):
    """Its excerpt is of a `make rehearsal`: the recorded one has other figures after the same labels."""
    readme = (ROOT / "README.md").read_text()
    excerpt = re.search(r"\n\n((?:    .*\n)+)\n## Use it", readme)[1]
    assert 0 == main(["summary", str(REHEARSED)])
    labels = re.compile(r" *[\w.]+:?")
    printed = {labels.match(line)[0] for line in capsys.readouterr().out.splitlines() if line}

    shown = [labels.match(line[4:])[0] for line in excerpt.splitlines()]
    assert "rehearsal:" == shown[0]
    assert {*shown[1:]} <= printed
    assert len(excerpt.splitlines()) <= 16
    assert len(readme.splitlines()) <= 100
    assert len(re.findall(r"^    make ", readme.split("\n## ")[0], re.MULTILINE)) == 2


def code_of(page):
    """Return a page's code: fenced blocks and indented lines, without the comments of shell lines."""
    text = page.read_text()
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    (\S.*)$", re.sub(r"(?ms)^```.*?^```$", "", text), re.MULTILINE)
    shell = [*(block for language, block in fenced if language == "bash"), *indented]
    other = [block for language, block in fenced if language != "bash"]
    return [re.sub(r"(?m) +# .*$", "", block) for block in shell], other


TRANSLATIONS = sorted([*ROOT.glob("*.zh.md"), *ROOT.glob("docs/*.zh.md")])


@pytest.mark.parametrize("translation", TRANSLATIONS, ids=lambda page: page.name)
def test_a_translation_has_the_code_the_headings_and_the_tables_of_its_original(translation):
    """So that neither is changed alone."""
    original = translation.with_name(translation.name.replace(".zh.md", ".md"))
    pages = [page.read_text() for page in (original, translation)]
    outside = [re.sub(r"(?ms)^```.*?^```$", "", text) for text in pages]
    headings, rows = (
        [re.findall(pattern, text, re.MULTILINE) for text in outside]
        for pattern in (r"^#+ ", r"^(?=\|)")
    )

    assert code_of(original) == code_of(translation)
    assert headings[0] == headings[1]
    assert len(rows[0]) == len(rows[1])
    assert f"]({translation.name})" in pages[0]
    assert f"]({original.name})" in pages[1]


@pytest.mark.timeout(600)
def test_the_tutorial_prints_what_its_commands_print():
    """If outputs change: tests/console_blocks.py docs/tutorial.md examples/tutorial docs/tutorial.zh.md."""
    pytest.importorskip("vl_convert")
    file = ROOT / "docs/tutorial.md"

    assert replayed(file, ROOT / "examples/tutorial") == file.read_text()


def test_the_page_of_asynchronous_training_prints_what_its_command_prints():
    """If outputs change: tests/console_blocks.py docs/asynchronous.md tests/data."""
    file = ROOT / "docs/asynchronous.md"

    assert replayed(file, ROOT / "tests/data") == file.read_text()


def test_the_recorded_runs_are_small_and_of_no_machine():
    """No path of the machine that they were recorded on, and no report or cache."""
    archives = sorted((ROOT / "examples/tutorial").glob("*.tar.gz"))
    assert ["after.tar.gz", "before.tar.gz", "fixed.tar.gz"] == [file.name for file in archives]
    assert sum(file.stat().st_size for file in archives) < 1_000_000
    for file in archives:
        with tarfile.open(file) as archive:
            for member in archive:
                assert re.fullmatch(
                    r"\w+(/(run.json|(processes|step_\d+)(/[\w.-]+)?))?", member.name
                )
                if member.isfile():
                    assert not re.search(
                        rb"/(?:work|root|home)/", archive.extractfile(member).read()
                    )


def test_workflows_pin_actions_by_digest_and_keep_no_credentials():
    """A tag can be moved; a token in the clone is not needed."""
    for file in (ROOT / ".github/workflows").glob("*.yml"):
        uses = re.findall(
            r"uses: (\S+)( # v[\d.]+)?\n(\s+with:\n\s+persist-credentials: false)?",
            file.read_text(),
        )
        assert uses
        for action, _, without in uses:
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)
            assert without or not action.startswith("actions/checkout@")


def test_one_table_has_the_measured_costs():
    """If benchmarks/costs.json changes, `python docs/generated.py` prints the table."""
    pytest.importorskip("duckdb")
    page = ROOT / "docs/platform.md"
    assert f"\n\n{generated().costs()}\n" in page.read_text()

    cost = re.compile(r"\d µs|\d (?:ms|s) of CPU")
    others = [file for file in ROOT.glob("*.md") if file.name.startswith(("README", "SECURITY"))]
    others += [file for file in (ROOT / "docs").rglob("*.md") if file != page]
    outside = {
        file.name: cost.findall(re.sub(r"(?s)```.*?```|`[^`]*`", "", file.read_text()))
        for file in others
    }

    assert {} == {name: found for name, found in outside.items() if found}
