"""The real trainer on a CPU: platform, tiny model, data, tools, and a stand-in engine.

Nothing outside this package imports it, except the command `verl-profiler rehearse` and the
options of the `rehearsal` config group.
"""
