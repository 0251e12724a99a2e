"""Capture tools: one file each, and no other module of the package depends on which there are."""

import json
import shutil
import sys

import msgspec
import pytest

from verl_profiler.capture import gather, session, tools
from verl_profiler.capture.node_check import probe_node, problems_of
from verl_profiler.capture.planner import make_plan
from verl_profiler.capture.verl_keys import translate
from verl_profiler.errors import ConfigError, ReadingError
from verl_profiler.launch.settings import parse
from verl_profiler.recording import recorder
from verl_profiler.recording.identity import Identity

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
