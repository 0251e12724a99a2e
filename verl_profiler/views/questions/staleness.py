"""The view of staleness: how old the samples of an asynchronous run are, and why."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows
from verl_profiler.analysis.staleness import staleness
from verl_profiler.analysis.staleness_causes import CAUSES, staleness_causes
from verl_profiler.render.charts import Spec, chart, name_bars, panel, step_bars, time_unit, tint
from verl_profiler.render.colors import ACCENT, MUTED
from verl_profiler.units import seconds, share
from verl_profiler.views.columns import common
from verl_profiler.views.staleness_text import by_cause, by_group, makers
from verl_profiler.views.view import Choice, DataTables, Section, View, asking, column

__all__ = ["VIEWS"]

_QUEUE = "#B9C2CC"


def _staleness(data: DataTables, choice: Choice) -> Spec:
    rows = data["staleness"]
    (whole,) = by_group(rows, "all")
    off = whole["off_policy_share"]
    title = f"Samples are {whole['behind']:.2f} weight versions behind when they are consumed"
    if off is not None:
        title += f"; {share(off)} of their tokens are off-policy"
    steps = sorted({row["step"] for row in rows})
    groups = makers(rows)
    made = name_bars(
        [f"{row['what']} ({row['samples']})" for row in groups],
        [
            ("in queue", column(groups, "waited"), _QUEUE),
            ("while generating", column(groups, "spanned"), ACCENT),
        ],
        "versions behind, mean",
    )
    return chart(
        title,
        f"{choice.text()}: {whole['samples']} samples of {len(steps)} steps",
        _distribution([row for row in rows if row["part"] == "versions"], steps),
        panel(made, title="By generated tokens, prompt tokens and aborts (samples)", height=0),
        notes="In queue: after the last token. While generating: between first and last token.",
    )


def _distribution(rows: Rows, steps: list[int]) -> Spec:
    tokens = {(row["step"], int(row["what"])): row["tokens"] for row in rows}
    totals = {
        step: sum(count for (own, _), count in tokens.items() if own == step) for step in steps
    }
    behind = sorted({versions for _, versions in tokens})
    bars = step_bars(
        steps,
        [
            (
                f"{versions} behind",
                [tokens.get((step, versions), 0) / max(totals[step], 1) for step in steps],
                tint(place / max(len(behind) - 1, 1)),
            )
            for place, versions in enumerate(behind)
        ],
        "share of tokens",
        form="%",
    )
    return panel(bars, title="Tokens by versions behind", height=200)


def _causes(data: DataTables, choice: Choice) -> Spec:
    rows = by_cause(data["staleness_causes"])
    samples, behind = rows[0]["samples"], sum(row["behind"] for row in rows)
    most = max(rows, key=lambda row: row["behind"])
    title = f"Samples are {seconds(sum(row['age_s'] for row in rows))} old when they are consumed"
    if behind:
        part = share(most["behind"] / behind)
        title += f"; {part} of the versions behind: {most['cause'].replace('_', ' ')}"
    causes = [row["cause"].replace("_", " ") for row in rows]
    factor, unit = time_unit(max(row["age_s"] for row in rows))
    of_versions = name_bars(
        causes, [("", column(rows, "behind"), ACCENT)], "versions behind, mean", legend=False
    )
    of_time = name_bars(
        causes,
        [("", column(rows, "age_s", factor), MUTED)],
        f"time per sample, mean [{unit}]",
        legend=False,
    )
    return chart(
        title,
        f"{choice.text()}: {samples} samples",
        panel(of_versions, title="Versions behind by cause", height=0),
        panel(of_time, title="From dispatch to consumption", height=0),
        notes="Versions count where the sample was when their weight sync began.",
    )


_CAUSE_TABLE = "\n".join(
    ["| cause | what the sample is in |", "| --- | --- |"]
    + [f"| `{cause}` | {text} |" for cause, text in CAUSES.items()]
)

VIEWS = (
    View(
        name="staleness",
        question="How stale are the samples that an asynchronous run trains on?",
        analysis=asking(staleness),
        columns=common("run step")
        | {
            "part": (
                "how samples are grouped: `all`; `versions`, by versions behind; `length` and "
                "`prompt_length`, in quartiles of the run's samples by generated tokens and by "
                "those of the prompt; `attempts`; or `prompt`, the stalest ones"
            ),
            "what": (
                "the group: versions behind, range of tokens, `aborted and resumed` or `not "
                "aborted`, or the uid of the prompt"
            ),
            "samples": "samples that the step consumed; of `versions`, by their oldest token",
            "waited": (
                "versions behind of the newest token, mean over samples; empty for `versions`"
            ),
            "spanned": (
                "versions between oldest and newest token, mean over samples; empty for `versions`"
            ),
            "behind": (
                "versions behind of the oldest token, mean over samples: waited plus spanned; "
                "empty for `versions`"
            ),
            "max_behind": "most versions behind",
            "tokens": "generated tokens; of `versions`, by their own version",
            "off_policy_tokens": "tokens of older weights than the trainer's",
            "unknown_tokens": (
                "tokens of samples of several versions whose own version is not recorded"
            ),
            "off_policy_share": (
                "share of off-policy tokens among those with a known version; empty without any"
            ),
            "logged_waited": (
                "verl's `training/off_policy/trajectory_staleness/mean`; only for `all`"
            ),
            "logged_behind": (
                "verl's `training/off_policy/trajectory_staleness_worst/mean`; only for `all`"
            ),
        },
        chart=_staleness,
        labels={
            "part": "grouped by",
            "what": "group",
            "waited": "behind in queue",
            "spanned": "behind while generating",
            "behind": "behind",
            "max_behind": "at most",
            "logged_waited": "verl's mean staleness",
            "logged_behind": "verl's worst staleness",
        },
        empty="no asynchronous training with recorded weight versions.",
        section=Section(
            "staleness",
            "Staleness",
            "how many weight versions the samples were behind when a step consumed them, by length "
            "and aborts; asynchronous runs only",
        ),
        shows="""\
Top: the generated tokens of each step, by how many versions their weights were behind the
trainer's. Bottom: the mean for the oldest token of each sample, divided into versions while the
sample waited in the queue after its last token, and versions between its first and last token.""",
        conclude="""
            - Mostly in queue: too many samples are in flight; fewer warm-up batches
              (`num_warmup_batches`) make them less stale.
            - Mostly while generating, and more in the longest quartile: long requests outlast steps.
            - More in the quartile of long prompts: their prefill, or longer answers to them.
            - Only samples that were `aborted and resumed` span versions, unless tools or queueing lie between calls.
            - Even the shortest samples are one version behind: samples are dispatched a step ahead,
              the price of overlapping.
        """,
        limits="""
            The trainer's version is that of its last weight sync. verl's metrics use the previous
            global step, which is the same if every step ends with a sync, and larger otherwise; verl 0.9's `verl.experimental` trainers do not log them. Versions
            count weight syncs, not how much the policy changed. A sample that spans several
            versions has tokens of unknown version if the engine did not report the version of each
            attempt.
        """,
    ),
    View(
        name="staleness_causes",
        question="What were samples in while they went stale?",
        analysis=asking(staleness_causes),
        columns=common("run step")
        | {
            "part": "`all` samples, or `request`: the ten stalest ones of the run",
            "what": "`all`, or the request's id",
            "cause": "what the samples were in",
            "samples": "samples that the step consumed; 1 for a request",
            "stale_samples": "samples with versions behind from this cause",
            "behind": (
                "weight versions that came meanwhile, of those behind: mean over samples; over "
                "all causes the `behind` of `staleness`"
            ),
            "earlier": (
                "weight versions that came meanwhile, before the sample's oldest token: mean over "
                "samples; they make nothing stale"
            ),
            "age_s": "time in this, mean over samples, in s; over all causes from dispatch to consumption",
        },
        chart=_causes,
        labels={
            "part": "grouped by",
            "what": "group",
            "stale_samples": "stale samples",
            "behind": "behind",
            "earlier": "before the first token",
            "age_s": "time",
        },
        empty="no asynchronous training with recorded weight versions.",
        section=Section(
            "staleness_causes",
            "Causes of staleness",
            "what samples were in while the weights went on without them; asynchronous runs only",
            link="Why stale",
        ),
        shows=f"""\
Top: the weight versions that samples were behind when they were consumed, by what they were in when the
sync of each version began. Bottom: the time from dispatch to consumption, by the same.

{_CAUSE_TABLE}
""",
        conclude="""
            - `queue`: samples are finished before the trainer needs them. Fewer in flight
              (`num_warmup_batches`, `staleness_threshold`).
            - `group`: the other requests of a prompt hold them up; look at the longest requests.
            - `generating`: requests outlast steps. Limit turns or response length; sync less often.
            - `paused`: an abort stopped calls for longer than the sync, while the trainer used the
              devices of a hybrid replica for example. Standalone replicas go on.
            - `between_calls`: slow tools or rewards.
            - `dispatch`: prompts are dispatched long before a call begins: too few agent loops,
              or replicas that are not ready. It makes nothing stale.
            - `redone`: time lost to aborts; the tokens that replace the lost ones are newer.
        """,
        limits="""
            Calls of one request that overlap count once. Without the dispatch of a sample, its age
            begins with the request. A version that no sync has sent by the time of consumption counts
            from the end of the trainer's last update.
        """,
    ),
)
