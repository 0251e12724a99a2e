"""The view of the load balancer: which replica got a generate call, and how loaded it was."""

from __future__ import annotations

from verl_profiler.analysis.routing import routes
from verl_profiler.analysis.selection import Rows, grouped
from verl_profiler.render.charts import Series, Spec, chart, name_bars
from verl_profiler.render.colors import PART_COLORS
from verl_profiler.units import counted, share
from verl_profiler.views.view import Choice, DataTables, known, view

_SHOWN = 16


@view(
    "routes",
    "Does the load balancer spread generate calls over the replicas, and why not?",
    routes,
    empty="no choice of a replica was recorded there.",
)
def _routes(data: DataTables, choice: Choice) -> Spec:
    rows = data["routes"]
    calls = sum(row["calls"] for row in rows)
    replicas: Rows = []
    for server, own in grouped(rows, "server").items():
        replicas.append(
            {
                "name": next((row["replica"] for row in own if row["replica"]), server),
                "calls": sum(row["calls"] for row in own),
                "sticky": sum(row["sticky"] for row in own),
                "excess": sum((row["excess"] or 0) * row["calls"] for row in own),
            }
        )
    replicas.sort(key=lambda replica: -replica["calls"])
    shown = replicas[:_SHOWN]
    cut = "" if len(shown) == len(replicas) else f" (first {_SHOWN} of {len(replicas)})"
    names = [replica["name"] for replica in shown]
    unbalanced = known(rows, "unbalanced")
    if sum(known(rows, "only_one")) == calls:
        title = "There was only one replica"
    else:
        sticky = share(sum(replica["sticky"] for replica in replicas) / calls)
        title = f"{sticky} of the generate calls are sticky"
    if any(unbalanced):
        title += (
            f"; {share(sum(unbalanced) / calls)} went to a replica that was not the least loaded"
        )
    series: list[Series] = [
        ("sticky", [replica["sticky"] for replica in shown], PART_COLORS["prefill"]),
        (
            "first, or moved",
            [replica["calls"] - replica["sticky"] for replica in shown],
            PART_COLORS["decode"],
        ),
    ]
    texts = [share(replica["calls"] / calls) for replica in shown]
    above = f"calls of each replica{cut}"
    panels = [name_bars(names, series, "generate calls", above=above, texts=texts)]
    if any(unbalanced):
        means = [replica["excess"] / replica["calls"] for replica in shown]
        bars = name_bars(
            names,
            [("", means, PART_COLORS["queue"])],
            "calls in flight above the least loaded replica, mean",
            above="load when a call was added",
            texts=[f"{mean:.1f}" for mean in means],
        )
        panels.append(bars)
    return chart(
        title,
        f"{choice.text()}: {calls:,} generate calls, {counted(len(replicas), 'replica')}",
        *panels,
        notes=(
            "verl sends later turns of a request to the replica that has its prefix cached (sticky). "
            "Loads are the load balancer's own counts of calls in flight, before each call."
        ),
    )
