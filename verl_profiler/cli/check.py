"""Check what a profiled run would record on this machine.

Reads the installed verl without importing it: which probes would be installed,
whether Hydra would find +profiler=multiturn, whether verl would load the
plugin, and whether nsys, nvtx and the output directory can be used. With
--config, print what a main_ppo command would capture.

Exit status 0: no problems.
1: something would be missing; see the lines marked `!`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_profiler.cli.options import Argument
from verl_profiler.cli.output import print_json
from verl_profiler.render.visible import shown

ARGUMENTS = (
    Argument(
        "-o",
        "--out",
        "--output-dir",
        default="logs",
        metavar="DIR",
        help="the folder for run directories (default: logs)",
    ),
    Argument("--json", action="store_true", help="print the findings as JSON"),
    Argument(
        "--config",
        nargs=argparse.REMAINDER,
        metavar="OVERRIDE",
        help="instead, print what a main_ppo command with these overrides would capture, and which "
        "settings of verl the keys become; takes the rest of the line",
    ),
)


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 0 if there are no problems, else 1."""
    if args.config is not None:
        from verl_profiler.launch import dry_run

        print("\n".join(shown(dry_run.explain(args.config))))
        return 0
    from verl_profiler.launch import doctor

    findings = doctor.examine(Path(args.out))
    if args.json:
        print_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            print(finding._replace(**shown(finding._asdict())).text())
    return 0 if all(finding.good for finding in findings) else 1
