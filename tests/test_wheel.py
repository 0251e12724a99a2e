"""The wheel, in an environment that has nothing else: configs, plugin, entry point, command."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What a build needs beside the packages.
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")

pytestmark = [pytest.mark.timeout(600), pytest.mark.wheel]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def bare(wheel):
    """A venv with the wheel and Hydra; return a function that runs its Python in an empty folder."""
    folder = wheel.parent
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run(
        [str(python), "-m", "pip", "install", "-q", str(wheel), "hydra-core"],
        check=True,
        capture_output=True,
    )
    (folder / "empty").mkdir()

    def run(*words):
        done = subprocess.run(
            [str(python), *words], capture_output=True, text=True, cwd=folder / "empty", check=False
        )
        assert 0 == done.returncode, done.stdout + done.stderr
        return done.stdout

    return run


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    """Pages of the report, requirement lists, import stubs, YAML, and what verl and SGLang look for."""
    folders = {"verl_profiler": "verl_profiler", "configs": "verl_profiler/configs"}
    there = {
        f"{target}/{file.relative_to(ROOT / folder)}"
        for folder, target in folders.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }

    packed = zipfile.ZipFile(wheel)
    (entries,) = (name for name in packed.namelist() if name.endswith("entry_points.txt"))
    text = packed.read(entries).decode()

    assert set() == there - {*packed.namelist()}
    assert "[verl.plugins]\nverl_profiler = verl_profiler.plugin\n" in text
    assert "[console_scripts]\nverl-profiler = verl_profiler.cli:main\n" in text


@pytest.mark.nightly
def test_hydra_composes_the_option_from_the_wheel(bare):
    """For any Hydra application, without a search path on its command line."""
    code = (
        "import hydra, json, pathlib\n"
        "from omegaconf import OmegaConf\n"
        "pathlib.Path('app.yaml').write_text('trainer: {}\\nactor_rollout_ref: {actor: {}, rollout: {}, "
        "ref: {}}\\ncritic: {}\\n')\n"
        "hydra.initialize_config_dir(str(pathlib.Path.cwd()), version_base=None)\n"
        "config = hydra.compose('app', ['+profiler=multiturn', 'profiler.events.detail_share=0.5'])\n"
        "print(json.dumps(OmegaConf.to_container(config)))\n"
    )
    config = json.loads(bare("-c", code))

    assert 0.5 == config["profiler"]["events"]["detail_share"]
    assert None is config["trainer"]["profile_steps"]
    assert "profile_ranks" in config["actor_rollout_ref"]["actor"]


PAGES = [*ROOT.glob("README*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
# Lines that install this package: from the clone they are run in, or from one at a path.
INSTALL = re.compile(
    r"pip install (?:--no-cache-dir )?('?)(\.|\S*/verl-profiler)(\[[\w,]+\])?\1(?=\s|$|`)"
)


def install_lines():
    """Return the distinct install lines of the pages, for a clone in the current directory."""
    return sorted(
        {
            f"pip install '.{found[3] or ''}'"
            for page in PAGES
            for found in INSTALL.finditer(page.read_text(encoding="utf-8"))
        }
    )


def test_no_page_installs_a_name_that_no_index_has():
    """An error message may: pip takes the extras of an installed package from its metadata."""
    by_name = re.compile(r"pip install (?:-\S+ )*'?verl-profiler\b.*")
    wrong = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in PAGES
        if page.name != "messages.md"
        for line in by_name.findall(page.read_text(encoding="utf-8"))
    ]

    assert [] == wrong


@pytest.mark.nightly
def test_the_install_lines_of_the_pages_work_in_a_fresh_environment(tmp_path):
    """Run as they stand in a clone; and the line of an error message, for what came from the clone."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("verl_profiler", "configs", "hydra_plugins"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copyfile(ROOT / name, clone / name)
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    path = f"{programs}:{os.environ['PATH']}"

    def run(line, cwd=clone):
        done = subprocess.run(
            line,
            check=False,
            shell=True,
            capture_output=True,
            text=True,
            cwd=cwd,
            env={**os.environ, "PATH": path},
        )
        return done.returncode, done.stdout + done.stderr

    plain, *others = install_lines()
    assert ("pip install '.'", True) == (plain, "pip install '.[report]'" in others)
    assert 0 == run(plain)[0]
    status, text = run("verl-profiler plot --list", tmp_path)
    line = text.splitlines()[-1].removesuffix(" (missing-extra)")
    assert (2, True) == (status, line.endswith(" -m pip install 'verl-profiler[plots]'")), text
    assert 0 == run(line, tmp_path)[0]
    assert 0 == run("verl-profiler plot --list", tmp_path)[0]
    for line in others:
        assert 0 == run(line.replace("install ", "install -q --dry-run "))[0], line
