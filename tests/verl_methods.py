"""Write which targets of the probes each version of verl has, by the sources in its wheel.

    pip download --no-deps -d WHEELS verl==0.9.1   # and the other versions
    python tests/verl_methods.py WHEELS/*.whl

`probes/test_pairs.py` reads the result.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

from verl_profiler.capture.probes import PROBES as CAPTURES
from verl_profiler.probes import all_probes
from verl_profiler.transfer_queue.probes import PROBES as TRACING

TABLE = Path(__file__).parent / "data" / "verl_methods.json"


def targets():
    """Return the targets in verl, in order."""
    probes = [*all_probes(), *TRACING, *CAPTURES]
    return sorted({each for probe in probes for each in probe.targets if each.startswith("verl.")})


class Wheel:
    """The sources of one version."""

    def __init__(self, path):
        self.version = Path(path).name.split("-")[1]
        self.files = zipfile.ZipFile(path)
        self.names = {*self.files.namelist()}

    def members(self, module):
        """Return what a module defines or imports by name; `(module, name)` for an import."""
        stem = module.replace(".", "/")
        for name in (f"{stem}.py", f"{stem}/__init__.py"):
            if name in self.names:
                break
        else:
            return {}
        found = {}
        for node in ast.walk(ast.parse(self.files.read(name))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {each.asname or each.name: (node.module, each.name) for each in node.names}
        for node in ast.parse(self.files.read(name)).body:
            if hasattr(node, "name"):
                found[node.name] = node
        return found

    def has(self, module, path):
        """Whether a function is there, or a method, also of a base class."""
        name, _, method = path.partition(".")
        members = self.members(module)
        found = members.get(name)
        if isinstance(found, tuple):
            inside = found[0].startswith("verl.")
            return not inside or self.has(found[0], f"{found[1]}.{method}".rstrip("."))
        if found is None or not method:
            return found is not None
        if any(getattr(each, "name", None) == method for each in found.body):
            return True
        bases = [base.id for base in found.bases if isinstance(base, ast.Name)]
        return any(base != name and self.has(module, f"{base}.{method}") for base in bases)


def main(paths):
    wheels = sorted(map(Wheel, paths), key=lambda each: each.version)
    table = {
        target: " ".join(each.version for each in wheels if each.has(*target.split(":")))
        for target in targets()
    }
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
