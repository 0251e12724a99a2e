"""Questions to the tables of a run: each function takes `Tables` and returns rows.

A function is named after the table that it returns.  It reads no files, draws nothing and keeps
nothing; rows come in a fixed order whatever the order of the events.

A docstring states what one row is; `verl_profiler/views/columns.md` describes the columns, and
docs/generated.py lists both.
"""
