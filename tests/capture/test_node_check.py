"""The check of the nodes before training: what is missing on which node, and the fix."""

import os
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from verl_profiler.capture import node_check
from verl_profiler.capture.node_check import _names, check_node, check_nodes
from verl_profiler.capture.plan import Plan, RoleCapture
from verl_profiler.errors import ConfigError


def plan(tool="nsys", waits_for="nvtx"):
    roles = {"actor": RoleCapture(None, {"capture-range": waits_for})}
    return Plan(tool, (1,), False, "/raw", "/journal", roles)


@pytest.fixture
def cluster(monkeypatch):
    """Return a function that makes a cluster of Ray whose nodes have these problems and versions."""

    def make(found):
        def actor(_ray, node):
            return SimpleNamespace(start=lambda *_: lambda _s: found[node], end=lambda: None)

        nodes = [{"NodeManagerHostname": host, "NodeID": host, "Alive": True} for host in found]
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: nodes))
        monkeypatch.setattr(node_check, "NodeActor", actor)

    return make


def test_the_command_ends_by_default(cluster):
    """The message names each node."""
    cluster({"h1": ([], "2025"), "h2": (["nvtx is not installed"], "")})
    with pytest.raises(ConfigError) as caught:
        check_nodes(plan())

    assert "cannot-capture" == caught.value.slug
    assert "h2: nvtx is not installed" in str(caught.value)


def test_different_versions_are_reported(cluster, capfd):
    """The reports of one node may be too new for the nsys of another."""
    old, new = "NVIDIA Nsight Systems version 2022.4", "NVIDIA Nsight Systems version 2025.1"
    versions = {"h1": old, "h2": old, "h3": new}
    cluster({host: ([], version) for host, version in versions.items()})

    check_nodes(plan())
    assert f"{old} on h1, h2; {new} on h3" in capfd.readouterr().err


def test_nodes_with_one_host_name_are_all_checked():
    """One of them must not hide the other."""
    nodes = [
        {"NodeManagerHostname": host, "NodeID": number * 20}
        for host, number in (("a", "1"), ("b", "2"), ("b", "3"))
    ]

    assert {"a": "1" * 20, "b (22222222)": "2" * 20, "b (33333333)": "3" * 20} == _names(nodes)


NSYS = """#!/bin/bash
[ "$1" = --version ] && { echo "NVIDIA Nsight Systems version 2025.1"; exit 0; }
[[ " $* " == *--trace=bogus* ]] && { echo "Illegal --trace argument"; exit 1; }
# It fails sometimes on a busy machine; Ray tries again too.
[ ! -e $0.tried ] && { touch $0.tried; exit 1; }
echo domain DOMAIN
"""


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Return a function that checks a node with a stand-in for nsys, which only checks its arguments."""
    agent, job = tmp_path / "bin", tmp_path / "job"
    others = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{job}{os.pathsep}{others}")

    def check(options, nvtx="0.2.17", domain="Domain", on=(agent,), python=0):
        run = subprocess.run

        def version(name):
            if nvtx is None:
                raise metadata.PackageNotFoundError(name)
            return nvtx

        def imports_ray(argv, **options):
            if argv[0] == "python":
                return subprocess.CompletedProcess(argv, python, "", "")
            return run(argv, **options)

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(subprocess, "run", imports_ray)
        for folder in on:
            folder.mkdir()
            (folder / "nsys").write_text(NSYS.replace("DOMAIN", domain))
            (folder / "nsys").chmod(0o755)
        path = os.pathsep.join(
            [str(agent), *(p for p in others.split(os.pathsep) if "nsys" not in p)]
        )
        return check_node("nsys", str(tmp_path / "a" / "raw"), options, path)

    check.job = job
    return check


BY_RANGE = {"trace": "nvtx", "capture-range": "nvtx", "o": "x"}


def test_a_node_that_can_capture_has_no_problem(node, tmp_path):
    """It makes the folder that nsys needs; on CUDA silent ranges do not matter."""
    by_cuda = {"actor": {**BY_RANGE, "capture-range": "cudaProfilerApi"}}

    assert ([], "NVIDIA Nsight Systems version 2025.1") == node(by_cuda, domain="DummyDomain")
    assert (tmp_path / "a" / "raw").is_dir()
    assert ([], "") == check_node("torch", str(tmp_path), {})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"on": ()}, "profiler.nsight.tool=torch"),
        ({"on": "job"}, "before `ray start`"),
        ({"nvtx": None}, "pip install nvtx"),
        ({"python": 1}, f"Put {sys.executable}'s folder first"),
        ({"options": {"trainer": {"trace": "bogus"}}}, "for trainer: Illegal --trace argument"),
        ({"domain": "DummyDomain"}, "nvtx==0.2.11"),
    ],
)
def test_every_problem_has_its_fix(node, changes, text):
    """The message is enough to fix the node; the options of each role are tried."""
    changes = {**changes, "on": (node.job,)} if changes.get("on") == "job" else changes
    options = {"actor": BY_RANGE, **changes.pop("options", {})}
    (problem,), _ = node(options, **changes)

    assert text in problem


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
    """A file is in the way."""
    (tmp_path / "raw").touch()

    ((problem,), _) = check_node("torch", str(tmp_path / "raw"), {})
    assert "profiler.nsight.directory" in problem


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

    assert "another user" in check_node("torch", str(place / "raw"), {})[0][0]
    assert ([], "") == check_node("torch", str(everybodys / "own" / "raw"), {})
