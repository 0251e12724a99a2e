"""The check of the nodes before training: what is missing on which node, and the fix."""

import os
import stat

import pytest

from verl_profiler.capture.node_check import _names, check_nodes, probe_node, problems_of
from verl_profiler.capture.plan import Plan, RoleCapture
from verl_profiler.errors import ConfigError

GOOD = {
    "python": "/env/bin/python",
    "directory": None,
    "options": {},
    "nvtx": "0.2.11",
    "nsys": "/opt/nsys",
    "nsys_of_job": "/opt/nsys",
    "version": "NVIDIA Nsight Systems version 2022.4.2.1",
    "bare_python": True,
    "silent": False,
}


def plan(tool="nsys", waits_for="nvtx"):
    roles = {"actor": RoleCapture(None, {"capture-range": waits_for})}
    return Plan(tool, (1,), False, "/raw", "/journal", roles)


def test_a_node_that_can_capture_has_no_problem():
    """Neither with nsys nor with a tool that needs none; on CUDA silent ranges do not matter."""
    assert [] == problems_of(GOOD, plan())
    assert [] == problems_of({"directory": None}, plan("torch"))
    assert [] == problems_of({**GOOD, "silent": True}, plan(waits_for="cudaProfilerApi"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nsys": None, "nsys_of_job": None}, "profiler.nsight.tool=torch"),
        ({"nsys": None}, "before `ray start`"),
        ({"nvtx": None}, "pip install nvtx"),
        ({"bare_python": False}, "/env/bin/python"),
        ({"directory": "Permission denied"}, "profiler.nsight.directory"),
        ({"options": {"actor": "Illegal --trace argument 'bogus'."}}, "Illegal --trace"),
        ({"silent": True, "nvtx": "0.2.17"}, "nvtx==0.2.11"),
    ],
)
def test_every_problem_has_its_fix(changes, text):
    """The message is enough to fix the node."""
    (problem,) = problems_of({**GOOD, **changes}, plan())

    assert text in problem


def test_the_command_ends_by_default(monkeypatch):
    """The message names each node."""
    monkeypatch.setattr(
        "verl_profiler.capture.node_check._probe_nodes",
        lambda _plan: {"h2": {**GOOD, "nvtx": None}},
    )
    with pytest.raises(ConfigError) as caught:
        check_nodes(plan())

    assert "cannot-capture" == caught.value.slug
    assert "h2: nvtx is not installed" in str(caught.value)


def test_different_versions_are_reported(monkeypatch, capfd):
    """The reports of one node may be too new for the nsys of another."""
    old, new = "NVIDIA Nsight Systems version 2022.4", "NVIDIA Nsight Systems version 2025.1"
    versions = {"h1": old, "h2": old, "h3": new}
    nodes = {host: {**GOOD, "version": version} for host, version in versions.items()}
    monkeypatch.setattr("verl_profiler.capture.node_check._probe_nodes", lambda _plan: nodes)

    check_nodes(plan())
    assert f"{old} on h1, h2; {new} on h3" in capfd.readouterr().err


def test_nodes_with_one_host_name_are_all_checked():
    """One of them must not hide the other."""
    nodes = [
        {"NodeManagerHostname": host, "NodeID": number * 20}
        for host, number in (("a", "1"), ("b", "2"), ("b", "3"))
    ]

    assert {"a": "1" * 20, "b (22222222)": "2" * 20, "b (33333333)": "3" * 20} == _names(nodes)


@pytest.fixture
def fake_nsys(tmp_path, monkeypatch):
    """A stand-in for nsys that only checks its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "nsys"
    script.write_text(
        "#!/bin/bash\n"
        '[ "$1" = --version ] && { echo "NVIDIA Nsight Systems version 2025.1"; exit 0; }\n'
        '[[ " $* " == *--trace=bogus* ]] && { echo "Illegal --trace argument"; exit 1; }\n'
        "echo domain Domain\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return script


def test_a_node_tries_the_options_of_every_role(fake_nsys, tmp_path):
    """And creates the folder that nsys needs."""
    made = tmp_path / "a" / "raw"
    options = {"actor": {"trace": "nvtx", "o": "x"}, "trainer": {"trace": "bogus"}}
    report = probe_node("nsys", str(made), options, os.environ["PATH"])

    assert made.is_dir()
    assert str(fake_nsys) == report["nsys"]
    assert "2025.1" in report["version"]
    assert {"trainer": "Illegal --trace argument"} == report["options"]


def test_nsys_may_fail_once(fake_nsys, tmp_path):
    """The real one does on a busy machine; Ray tries again too."""
    tried = tmp_path / "tried"
    fake_nsys.write_text(
        f"#!/bin/bash\n[ $1 = profile ] && [ ! -e {tried} ] && {{ touch {tried}; exit 1; }}\nexit 0\n"
    )
    report = probe_node("nsys", str(tmp_path), {"actor": {}}, os.environ["PATH"])

    assert tried.exists()
    assert {} == report["options"]


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
    """A file is in the way."""
    (tmp_path / "raw").touch()

    assert probe_node("torch", str(tmp_path / "raw"), {})["directory"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes folders of other users")
@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_that_another_user_made_beforehand_is_refused(tmp_path, linked):
    """In a place where everybody may write; reports hold command lines and environments."""
    everybodys = tmp_path / "tmp"
    everybodys.mkdir()
    everybodys.chmod(0o1777)
    place = everybodys / "nsight"
    if linked:
        place.symlink_to(tmp_path)
        os.chown(place, 12345, 12345, follow_symlinks=False)
    else:
        place.mkdir()
        os.chown(place, 12345, 12345)

    assert "another user" in probe_node("torch", str(place / "raw"), {})["directory"]
    assert probe_node("torch", str(everybodys / "own" / "raw"), {})["directory"] is None
