"""Compare two runs, or two ranges of steps: metrics, tests, conditions."""
