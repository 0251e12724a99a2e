"""`verl-profiler check`: what a run would record here."""

import importlib.metadata
import importlib.util
import json

import pytest

from verl_profiler.cli import main
from verl_profiler.instrumentation.probe import Probe
from verl_profiler.launch import doctor, targets

HOOKED = "loads no plugins: Ray's worker process set-up hook does"


def test_the_lines_name_what_was_checked(tmp_path, capsys):
    """Python, verl, plugin, Hydra, each family of probes, nsys, the directory; as JSON for programs."""
    main(["check", "-o", str(tmp_path / "logs")])
    out = capsys.readouterr().out
    main(["check", "--json", "--output-dir", str(tmp_path)])
    findings = json.loads(capsys.readouterr().out)

    topics = {"verl", "environment", "plugin", "hydra", "probes rollout", "nsys"}
    for topic in {*topics, "output directory"}:
        assert f"  {topic}" in out or f"! {topic}" in out
    assert {"topic", "good", "message", "advice", "details"} == set(findings[0])
    assert topics <= {each["topic"] for each in findings}


@pytest.mark.verl
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_a_supported_verl_has_no_problems(tmp_path):
    """And the exit status is 0."""
    assert 0 == main(["check", "--output-dir", str(tmp_path)])


def test_problems_are_reported_with_a_fix(monkeypatch, tmp_path, capsys):
    """A directory that cannot be created, a policy without this package."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")

    assert 1 == main(["check", "--output-dir", str(tmp_path / "file" / "logs")])
    out = capsys.readouterr().out
    assert "! output directory" in out
    assert "profiler.output_dir=DIR" in out
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in out


def test_targets_are_found_by_reading_sources(tmp_path, monkeypatch):
    """Also methods that a base class of another module defines; nothing is imported."""
    package = tmp_path / "probed_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (package / "mixin.py").write_text("class Mixin:\n    def inherited(self): ...\n")
    (package / "host.py").write_text(
        "from probed_package.mixin import Mixin\n\n\nclass Host(Mixin):\n    async def own(self): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = ["Host.own", "Host.inherited", "Host.gone"]
    probes = [Probe(path, "rollout", (f"probed_package.host:{path}",)) for path in paths]
    probes.append(Probe("elsewhere", "rollout", ("no_such_package.host:Host.own",)))

    states = [row.state for row in targets.find_targets(probes)]

    assert ["found", "found", "missing", "no module"] == states


@pytest.mark.parametrize(
    ("version", "plugin", "probes"),
    [
        (
            "0.7.1",
            f"! plugin                verl 0.7.1 {HOOKED}; most probes have no target in it",
            None,
        ),
        ("0.8.0", f"  plugin                verl 0.8.0 {HOOKED}", None),
        ("0.9.0.dev1", "  plugin                verl >= 0.9 loads it in every process", None),
        ("0.10.0", "  plugin                verl >= 0.9 loads it in every process", None),
        (None, None, ["! probes                none would be installed without verl"]),
    ],
)
def test_a_verl_that_is_old_or_missing_takes_one_line(
    monkeypatch, tmp_path, capsys, version, plugin, probes
):
    """verl before 0.9 has no plugins, before 0.8 few targets; without verl, no probe is listed by itself."""
    found = importlib.metadata.version

    def version_of(name):
        if name == "verl" and version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version if name == "verl" else found(name)

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setattr(doctor, "find_targets", lambda _: [])
    main(["check", "--output-dir", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()

    if plugin is not None:
        assert plugin in lines
    if probes is not None:
        assert probes == [line for line in lines if "probe" in line]


def test_the_probes_of_what_is_not_installed_share_a_line(monkeypatch, tmp_path, capsys):
    """One of each category for verl's, and one for those of other packages, with their names."""
    monkeypatch.setattr(targets.Sources, "tree", lambda *_: None)
    main(["check", "--output-dir", str(tmp_path), "--json"])
    findings = json.loads(capsys.readouterr().out)

    of_probes = [each for each in findings if each["topic"].startswith("probes ")]
    assert of_probes
    details = {each["topic"]: each["details"] for each in of_probes}
    assert {1, 2} == {len(lines) for lines in details.values()}
    assert "server_route" in details["probes rollout"][0]
