"""What every command answers about the recorded runs, kept while the code is rebuilt.

python tests/answers/answers.py [RUN ...]           print what differs from the kept answers
python tests/answers/answers.py --write [RUN ...]   keep the answers of today; the commit's message
                                                    names what changed and why it is truer
"""

import contextlib
import gzip
import io
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

from verl_profiler.cli import main
from verl_profiler.reading.reader import load
from verl_profiler.views.sections import document

HERE = Path(__file__).parent
DATA = HERE.parent / "data"
CASES = HERE.parents[2] / "shared" / "cases"
# Those that take a run and print JSON; `plot` brings the tables of all views.
COMMANDS = (
    ("summary",),
    ("why",),
    ("requests",),
    ("tq",),
    ("memory",),
    ("plot", "all"),
)
# Of the page: what no command prints.
PAGE = ("sentences", "findings", "notes", "problems", "steps")


def runs():
    """Return the path of each recorded run by its name."""
    found = {"small_run": DATA / "small_run", "tq_run": DATA / "tq" / "run.tar.gz"}
    found |= {path.name.removesuffix(".tar.gz"): path for path in DATA.glob("*_run.tar.gz")}
    if CASES.is_dir():
        found |= {path.parent.name: path for path in CASES.glob("[1-4]*/*.tar.gz")}
    return dict(sorted(found.items()))


def logs():
    """Return the paths of each console log by its name."""
    found = {path.stem: path for path in (DATA / "console_logs").glob("*.log")}
    if CASES.is_dir():
        found |= {f"{path.parent.name}-{path.stem}": path for path in CASES.glob("*-log*/*.*")}
        found |= {f"11-{path.stem}": path for path in CASES.glob("11-*/*.log")}
    return dict(sorted(item for item in found.items() if item[1].name != "truth.json"))


def answers_of_run(path, folder):
    """Return what each command prints of a run that is copied into `folder`."""
    copy = folder / path.name.removesuffix(".tar.gz")
    if path.is_dir():
        shutil.copytree(path, copy, ignore=shutil.ignore_patterns(".cache"))
    else:
        # An archive itself is converted again for each command.
        shutil.unpack_archive(path, folder)
        (unpacked,) = folder.iterdir()
        unpacked.rename(copy)
    found = {" ".join(command): printed(*command, copy) for command in COMMANDS}
    with load([copy]) as opened:
        page = document(opened)
    found["report"] = {name: page[name] for name in PAGE}
    return normal(found, folder)


def answers_of_log(path, folder):
    """Return what `timing` prints of a console log."""
    copy = folder / path.name
    shutil.copy(path, copy)
    return normal({"timing": printed("timing", copy)}, folder)


def printed(*command):
    """Run a command with `--json`; return its status, its output, and its errors."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main([*map(str, command), "--json"])
    text = out.getvalue()
    return {
        "status": status,
        "output": json.loads(text) if text.strip() else None,
        "errors": errors.getvalue(),
    }


def normal(value, folder):
    """Return it without paths, and with numbers of seven digits: sums are added in any order."""
    if isinstance(value, dict):
        return {str(key): normal(each, folder) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [normal(each, folder) for each in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.7g}")
    if isinstance(value, str):
        return value.replace(str(folder), "")
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def all_answers(names=()):
    """Yield (name, answers) of each run and each log, or of those that are named."""
    for kind, of in ((runs(), answers_of_run), (logs(), answers_of_log)):
        for name, path in kind.items():
            if not names or name in names:
                with tempfile.TemporaryDirectory() as folder:
                    yield name, of(path, Path(folder))


def kept(name):
    """Return the kept answers of a run or log; None without."""
    path = HERE / f"{name}.json.gz"
    return json.loads(gzip.decompress(path.read_bytes())) if path.exists() else None


def differences(old, new, where=""):
    """Yield one line for each value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key), new.get(key), f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{where}[{place}]")
    elif old != new and not (
        isinstance(old, float)
        and isinstance(new, int | float)
        and math.isclose(old, new, rel_tol=1e-5, abs_tol=1e-7)
    ):
        yield f"{where}: {short(old)} -> {short(new)}"


def short(value):
    """Return a value in at most 100 characters."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def differing(names=()):
    """Yield one line for each value that is not what was kept."""
    for name, found in all_answers(names):
        old = kept(name)
        if old is not None:
            yield from (f"{name}{line}" for line in differences(old, found))


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--write"]
    if "--write" in sys.argv:
        for each, answer in all_answers(words):
            for line in differences(kept(each) or {}, answer):
                print(f"{each}{line}"[:300])
            content = json.dumps(answer, separators=(",", ":")).encode()
            (HERE / f"{each}.json.gz").write_bytes(gzip.compress(content, 9, mtime=0))
    else:
        for line in differing(words):
            print(line[:300])
