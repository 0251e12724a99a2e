"""Play the recorded rehearsal again: its lines in the order in which they were written."""

import json


def lines_in_order(run):
    """Return (path below the run, line with its newline) by the lines' times."""
    found = [
        (json.loads(line)["timestamp"], str(path.relative_to(run)), line)
        for path in sorted(run.glob("step_*/*.jsonl"))
        for line in path.read_bytes().splitlines(keepends=True)
    ]
    return [(path, line) for _, path, line in sorted(found, key=lambda each: each[0])]


def grow(run, pieces):
    """Append bytes to files of a run directory."""
    for name, piece in pieces:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(piece)
