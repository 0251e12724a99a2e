"""Plot the timers in a console log of verl: five figures in the folder `plot` next to the log.

    python plot_timing_metrics.py verl_demo.log
    python plot_timing_metrics.py verl_demo.log --output-dir ./my_plots

The same as `verl-profiler timing`, which has more options.
"""

import sys

from verl_profiler.cli import main

if __name__ == "__main__":
    sys.exit(main(["timing", *sys.argv[1:]]))
