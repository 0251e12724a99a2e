"""A custom reward function for verl: half a point for the format, half for the answer.

`span` adds its calls to the run's events; without the profiler it does nothing.
"""

import re

from verl_profiler import span


@span("answer_check")
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return 0, 0.5 or 1."""
    found = re.findall(r"#### (-?\d+)", solution_str)
    if not found:
        return 0.0
    return 1.0 if found[-1] == ground_truth else 0.5
