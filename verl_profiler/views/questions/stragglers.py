"""View of stragglers: what the others wait for."""

from __future__ import annotations

from collections.abc import Mapping

from verl_profiler.analysis.explain.stragglers import straggler_requests, stragglers
from verl_profiler.analysis.selection import Rows
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.charts import Spec, chart, name_bars, panel, time_unit
from verl_profiler.render.colors import ACCENT, MUTED
from verl_profiler.units import seconds, share
from verl_profiler.views.columns import common
from verl_profiler.views.view import Choice, DataTables, View, column

__all__ = ["TABLES", "VIEWS"]

# By the reason of a straggler: what the waiting is due to.
_DUE_TO = {
    "late": "late starts",
    "queued": "queueing",
    "parked": "pauses of the engine",
    "cold": "lost prefix caches",
    "prefill": "slow or long prefill",
    "recomputed": "retractions and aborts",
    "undivided": "engine time that was not divided",
    "long": "long requests",
    "slow": "slow decoding",
    "tool": "tools",
    "other": "other causes",
}


def _straggler_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    return {
        "stragglers": stragglers(tables, choice.steps),
        "straggler_requests": straggler_requests(tables, choice.steps, choice.count),
    }


def _stragglers(data: DataTables, choice: Choice) -> Spec:
    rows = data["stragglers"]
    kinds = dict.fromkeys(row["kind"] for row in rows)
    worst = [
        max((r for r in rows if r["kind"] == kind), key=lambda r: r["caused_wait_s"])
        for kind in kinds
    ]
    reasons = [row for row in rows if row["kind"] == "request"]
    others = sorted(
        (row for row in worst if row["kind"] != "request"), key=lambda row: -row["per_step_s"]
    )
    if reasons:
        title = (
            f"{share(reasons[0]['share'])} of straggler waiting is due to "
            f"{_DUE_TO[reasons[0]['who']]}"
        )
    else:
        title = (
            f"{others[0]['who']} keeps others waiting in {others[0]['kind']}, "
            f"{seconds(others[0]['per_step_s'])} per step"
        )
    panels: list[Spec] = []
    if reasons:
        factor, unit = time_unit(max(row["per_step_s"] for row in reasons))
        bars = name_bars(
            [row["who"] for row in reasons],
            [("caused wait time", column(reasons, "per_step_s", factor), ACCENT)],
            f"caused wait time per step [{unit}]",
            texts=[f"{seconds(row['per_step_s'])}, {share(row['share'])}" for row in reasons],
            legend=False,
        )
        panels.append(panel(bars, title="requests, by reason", height=0))
    if others:
        factor, unit = time_unit(max(row["per_step_s"] for row in others))
        bars = name_bars(
            [f"{row['kind']}: {row['who']}" for row in others],
            [("caused wait time", column(others, "per_step_s", factor), MUTED)],
            f"caused wait time per step [{unit}]",
            texts=[f"{seconds(row['per_step_s'])}, {share(row['share'])}" for row in others],
            legend=False,
        )
        panels.append(panel(bars, title="the worst of each other kind, per step", height=0))
    return chart(
        title,
        f"{choice.text()}: {max(row['of_steps'] for row in rows)} steps; wait time, attributed to "
        "what is still running",
        *panels,
        notes="Percent: share of the wait time of its kind.",
    )


_STRAGGLER_REASONS = """\
A finished request waits for the last one of its step.
Each moment of that waiting is attributed in equal parts to the requests that are still running.
The same for workers (by their last request), replicas (by their last generate call) and ranks in \
each phase of the trainer.
Above: requests, by the reason why they finished later than the median one.
Below: of each other kind, the one with most caused wait time.
A tool is attributed its share of the request's delay.

| reason | |
| --- | --- |
| `late` | it started later |
| `queued` | it waited in the engine or on the way there |
| `parked` | the engine was paused for a weight sync |
| `cold` | tokens that its previous call had cached were prefilled again |
| `prefill` | the prefill of new tokens took longer: longer prompts, or a busy engine |
| `recomputed` | the engine retracted or aborted it; estimated from other calls' speed |
| `undivided` | its generate calls took longer; the engine's queue, prefill and decode times were not recorded |
| `long` | it generated more |
| `slow` | it took longer per token |
| `tool` | it waited for tools |
| `other` | reward, post-processing, and what no event explains |"""


VIEWS = (
    View(
        name="stragglers",
        question="Which requests, tools, workers and ranks do the others wait for, and why?",
        analysis=_straggler_tables,
        columns=common("run")
        | {
            "kind": (
                "`request`; `tool`, charged with a request's caused wait time in proportion to its "
                "share of the request's delay; `worker` and `replica`, by the end of the last "
                "request or generate call of each; or a phase of the trainer"
            ),
            "who": (
                "the reason for requests, the rank's process for phases, otherwise the tool, "
                "process or replica"
            ),
            "steps": "number of steps in which it caused waiting",
            "of_steps": "number of steps",
            "last": "number of steps in which it ended last",
            "caused_wait_s": (
                "caused wait time in all steps: the others' waiting attributed to it, in s"
            ),
            "per_step_s": "caused_wait_s divided by of_steps, in s",
            "share": "part of the caused wait time of its kind",
        },
        chart=_stragglers,
        empty="no waiting was recorded there.",
        section="path",
        shows=_STRAGGLER_REASONS,
        conclude="""
            - `long`: limits on turns and response length, or more prompts than needed.
            - `queued` or `slow`: too many requests per replica, or one slow replica; see the
              replicas.
            - `tool`: the tool named on the right.
            - A rank or worker with nearly all of its kind's caused wait time in most steps:
              check its host.
            - A share close to even: no process stands out.
        """,
        limits="""
            Caused wait time is waiting, not lost time: engines are busy while a long request
            runs. 100 % of a short wait is still short: the label shows the seconds. Only
            finished training requests count. Decoding is tokens times time per token; each of
            the two is compared with the median request's. `straggler_requests` lists single
            requests.
        """,
        takes=frozenset({"count"}),
    ),
)

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "straggler_requests": common("run step name request_id sample")
    | {
        "caused_wait_s": "caused wait time: the others' waiting attributed to it, in s",
        "share": "part of all waiting for requests in the step",
        "behind_s": (
            "how much later than the median request of the step it ended, in s; the components add "
            "up to it"
        ),
        "because": "the largest component, such as `tool`",
        "late_s": "component: it started later, in s",
        "queued_s": "component: it waited in the engine's queue or on the way there, in s",
        "parked_s": "component: it waited while the engine was paused for a weight sync, in s",
        "cold_s": "component: its prefix was no longer cached and was prefilled again, in s",
        "prefill_s": "component: the prefill of its new tokens took longer, in s",
        "recomputed_s": "component: it was retracted, or aborted, and computed again, in s",
        "undivided_s": (
            "component: its generate calls without queue and prefill times took longer, in s "
            "(`profiler.events.engine_timing`)"
        ),
        "long_s": "component: it generated more tokens, in s",
        "slow_s": "component: it took longer per token, in s",
        "tool_s": "component: it waited for tools, in s",
        "other_s": "component: reward, postprocessing or unattributed time, in s",
        "batch": (
            "requests that ran on its replicas during its decoding, mean by time; empty if the "
            "engine's part was not recorded"
        ),
        "typical_batch": "the same of the step's median request",
    },
}
