"""Write small_run.tables.json: every analysis of small_run, with floats to 9 digits."""

import json
from pathlib import Path

from verl_profiler.analysis import ANALYSES, EXPLANATIONS, SUMMARY
from verl_profiler.reading.reader import load

HERE = Path(__file__).parent


def tables():
    with load(HERE / "small_run", cache=False) as run:
        made = {name: ANALYSES[name](run.tables) for name in (*SUMMARY, *EXPLANATIONS)}
    return json.loads(json.dumps(made, default=str), parse_float=lambda text: round(float(text), 9))


if __name__ == "__main__":
    path = HERE / "small_run.tables.json"
    path.write_text(json.dumps(tables(), indent=1) + "\n", encoding="utf-8")
    print(f"Wrote {path}")
