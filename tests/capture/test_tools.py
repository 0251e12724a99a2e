"""Capture tools: one file each, and no other module of the package depends on which there are."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import verl_profiler
from verl_profiler.capture import gather, session, tools
from verl_profiler.capture.node_check import probe_node, problems_of
from verl_profiler.capture.planner import make_plan
from verl_profiler.capture.verl_keys import translate
from verl_profiler.errors import ConfigError, ReadingError
from verl_profiler.launch.settings import parse
from verl_profiler.recording import recorder
from verl_profiler.recording.identity import Identity

PACKAGE = Path(verl_profiler.__file__).parent
TOOLS = PACKAGE / "capture" / "tools"
NAMES = {"nsys", "torch"}


def is_name(node):
    """Whether an expression is a tool's name, or a group with one in it."""
    parts = [node, *getattr(node, "elts", ())]
    return any(isinstance(part, ast.Constant) and part.value in NAMES for part in parts)


def depends_on_a_name(node):
    """Whether a syntax node compares with a tool's name or looks something up by it.

    `sys.modules["torch"]` and `sys.modules.get("torch")` ask for the imported library.
    """
    match node:
        case ast.Compare(left=left, comparators=others):
            return any(map(is_name, [left, *others]))
        case ast.MatchValue(value=value):
            return is_name(value)
        case ast.Dict(keys=keys):
            return any(map(is_name, keys))
        case ast.Subscript(value=value, slice=key):
            return ast.unparse(value) != "sys.modules" and is_name(key)
        case ast.Call(func=ast.Attribute(value=value, attr="get" | "pop"), args=[key, *_]):
            return ast.unparse(value) != "sys.modules" and is_name(key)
    return False


def test_the_walk_finds_what_depends_on_a_name():
    """And the imported library is no name of a tool."""
    depending = (
        *('tool == "nsys"', '"torch" != tool', 'tool in ("nsys", "torch")', 'ways = {"nsys": 1}'),
        *(
            'match tool:\n case "nsys": pass',
            'ways["torch"]',
            'ways.get("nsys")',
            'Literal["nsys"]',
        ),
    )
    others = (
        *('sys.modules.get("torch")', 'sys.modules["torch"]', 'for n in ("ray", "torch"): pass'),
        *('{"tool": tool}', 'event.get("cat", "torch")'),
    )
    for codes, expected in ((depending, True), (others, False)):
        for code in codes:
            found = any(depends_on_a_name(node) for node in ast.walk(ast.parse(code)))
            assert expected == found, code


def test_no_module_beside_the_tools_compares_with_their_names():
    """A further tool is a file of its own, and nothing else has to know of it."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.is_relative_to(TOOLS)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if depends_on_a_name(node)
    ]

    assert [] == found


def test_tools_are_light_enough_for_training_processes():
    """Loading them imports nothing beyond the standard library and this package."""
    code = (
        "import sys; from verl_profiler.capture import tools\n"
        "assert tools.names() == [tool.name for tool in tools.every()]\n"
        "found = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(found - {'verl_profiler'} - sys.stdlib_module_names))"
    )
    bare = "import sys; print(sorted({n.partition('.')[0] for n in sys.modules}))"
    before, after = (
        set(ast.literal_eval(subprocess.check_output([sys.executable, "-c", each], text=True)))
        for each in (bare, code)
    )

    # What .pth files bring in is there before.
    assert after <= before


TOY = '''
"""A tool of one file: it writes down when it was started and stopped."""
from verl_profiler.capture.tools import Tool


class Toy(Tool):
    name, title, suffix = "toy", "the toy", ".toy"
    started = []

    def options(self, config, settings, key, output, captures):
        return {"captures": str(captures), "output": output}

    def start(self, capture):
        self.started.append(capture.options["captures"])
        return "running"

    def stop(self, handle, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(handle)

    def probe_node(self, options, path=None):
        return {"toy": options}

    def node_problems(self, report, options):
        return [] if report["toy"] == options else ["no toy"]


TOOL = Toy()
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Add a third tool as one more file of the folder."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "toy.py").write_text(TOY)
    monkeypatch.setattr(tools, "__path__", [*tools.__path__, str(folder)])
    yield tools.find("toy")
    sys.modules.pop(f"{tools.__name__}.toy")
    del tools.toy


def test_a_third_tool_needs_no_other_module(toy, worker_config, tmp_path):
    """From the settings through plan, node check and capture session to the gathered report."""
    omegaconf = pytest.importorskip("omegaconf")
    run = tmp_path / "run"
    config = omegaconf.OmegaConf.create(
        {
            "trainer": {"profile_steps": [2], "nnodes": 1, "n_gpus_per_node": 1, "device": "cpu"},
            "global_profiler": {"tool": None, "steps": None},
        }
    )
    settings = parse({"output_dir": "x", "nsight": {"tool": "toy", "roles": {"agent_loop": [0]}}})
    capture = translate(config, settings.nsight.tool)
    plan = make_plan(config, capture, settings.nsight, run)
    options = {role: of.options for role, of in plan.roles.items()}

    assert [] == problems_of(probe_node("toy", plan.directory, options), plan)

    recorder.start(
        msgspec.structs.replace(worker_config, capture_plan=plan.encode()),
        lambda: Identity("agent_loop", 0),
    )
    recorder.active()._writer.identity = Identity("agent_loop", 0)
    session.start(None, 2)
    session.stop()
    recorder.stop()
    (record,) = gather.collect(run)

    assert ["1"] == toy.started
    assert ("agent_loop_0.step2.toy", "toy", "") == (record.file, record.tool, record.problem)
    assert "running" == (run / "nsight" / "agent_loop_0.step2.toy").read_text()
    assert "toy" == json.loads((run / "nsight" / "captures.json").read_text())[0]["tool"]


def test_a_tool_that_is_not_there_is_refused_before_training():
    """With the names of those that are."""
    with pytest.raises(ConfigError, match=r"profiler\.nsight.*'nsy'.*nsys, torch"):
        parse({"output_dir": "x", "nsight": {"tool": "nsy"}})


def test_without_nsys_the_command_that_exports_is_in_the_message(tmp_path, monkeypatch):
    """To be run on another machine."""
    report = tmp_path / "a.nsys-rep"
    report.touch()
    monkeypatch.setattr(shutil, "which", lambda _name: None)

    with pytest.raises(ReadingError) as caught:
        tools.get("nsys").export(report)
    assert "no-nsys" == caught.value.slug
    assert f"nsys export --type sqlite -o {tmp_path / 'a.sqlite'} {report}" in str(caught.value)
