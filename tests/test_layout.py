"""The folders of the package import in one direction, and neither half imports the other."""

import ast
from pathlib import Path

import verl_profiler

PACKAGE = Path(verl_profiler.__file__).parent
# Each imports from those before it in its own half, and from what both halves have.
BOTH = ("errors", "environ", "units", "events")
RECORDING = (
    ("recording",),
    ("instrumentation",),
    ("probes",),
    ("nodes", "storage"),
    ("transfer_queue", "capture"),
    ("plugin",),
    ("launch",),
    ("rehearsal", "recipes", "hydra_plugins"),
)
READING = (("reading",), ("analysis",), ("render",), ("views",), ("exports", "live"))
# They stand above both halves.
TOP = ("__init__", "__main__", "cli")


def imports_of(path):
    """Return the folders and modules of the package that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "verl_profiler":
            names = [f"verl_profiler.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            if name.startswith("verl_profiler."):
                yield name.split(".")[1]


def modules():
    """Yield each module with the folder, or module, of the package that it belongs to."""
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        if "import-path" not in relative.parts and relative.parts[0] != "configs":
            yield relative.with_suffix("").parts[0], relative, path


def allowed():
    """Return, by folder, which others it may import."""
    may = {name: {*BOTH} for name in BOTH}
    for half in (RECORDING, READING):
        below = {*BOTH}
        for floor in half:
            for name in floor:
                may[name] = {*below, name}
            below |= {*floor}
    everything = {*may, *TOP}
    return {**may, **dict.fromkeys(TOP, everything)}


def test_each_folder_has_its_place():
    """A new one is to be put into the table, and into docs/how-it-works.md."""
    found = {folder for folder, _, _ in modules()}

    assert found <= {*allowed()}
    page = (Path(__file__).parents[1] / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    for folder in found - {*TOP}:
        assert f"`{folder}" in page, folder


def test_imports_go_one_way():
    """Downwards, and never into the other half."""
    may = allowed()
    wrong = [
        f"{relative} imports {name}"
        for folder, relative, path in modules()
        for name in imports_of(path)
        if name not in may[folder] and name not in ("__version__", "span", "log_manager", "configs")
    ]

    assert [] == wrong
