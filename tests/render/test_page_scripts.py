"""The report page's scripts: modules become one script, and their types are the document's."""

import re
from pathlib import Path

import pytest
from cached_runs import SMALL

from verl_profiler.reading.reader import load
from verl_profiler.render import html
from verl_profiler.views.sections import document

DATA = Path(__file__).parents[1] / "data"
TYPES = Path(html.__file__).with_name("page") / "document.d.ts"


def declared():
    """Return, by interface of document.d.ts, the fields that are always there."""
    text = re.sub(r"/\*\*.*?\*/|//[^\n]*", "", TYPES.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = {}
    for name, bases, body in re.findall(
        r"^interface (\w+)(?: extends ([\w, ]+))? \{(.*?)^\}", text, re.MULTILINE | re.DOTALL
    ):
        fields = {*re.findall(r"(\w+): [^;]+;", body)}
        found[name] = fields.union(*(found[base] for base in re.findall(r"\w+", bases)))
    return {
        "steps": found["StepRow"],
        "time_tree": found["TreeRow"],
        "requests": found["DrawnRequest"],
    }


@pytest.fixture(scope="module")
def documents():
    """The documents of a run of requests and of one of traced TransferQueue calls."""
    made = []
    for path in (SMALL, DATA / "tq" / "run.tar.gz"):
        with load(path) as run:
            made.append(document(run))
    return made


def test_the_tables_have_the_columns_that_the_scripts_read(documents):
    """`tsc` holds the scripts to the types, and this the types to the tables."""
    columns = {}
    for data in documents:
        tables = {**data, "requests": data["timelines"]["requests"]}
        for name, table in tables.items():
            if isinstance(table, dict):
                columns.setdefault(name, set()).update(table.get("columns", ()))
    types = declared()
    missing = {
        name: fields - columns[name]
        for name, fields in types.items()
        if columns[name] and not fields <= columns[name]
    }

    assert {} == missing
    assert all(columns[name] for name in types)
