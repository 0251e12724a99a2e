"""Findings of asynchronous runs, judged by what their devices did: there is no critical path per step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import ClassVar

from verl_profiler.analysis.explain.asynchronous_model import Rollouter, rollouters
from verl_profiler.analysis.explain.changes import CHANGES
from verl_profiler.analysis.explain.concentration import Culprit, Found, Place, lost_to
from verl_profiler.analysis.explain.culprits import culprits
from verl_profiler.analysis.explain.engine_culprits import lost_by_engine
from verl_profiler.analysis.explain.finding import (
    LARGE,
    LEAST,
    Account,
    Finding,
    finding_of,
    in_account,
    in_order,
    of_rule,
    with_rest,
    without_superfluous,
)
from verl_profiler.analysis.explain.fixes import Facts, fixes_of
from verl_profiler.analysis.explain.ledger import ACCOUNTS, is_training
from verl_profiler.analysis.explain.model import TRAINING
from verl_profiler.analysis.explain.rules import RULES, TEXTS, Rule, Texts, other_texts
from verl_profiler.analysis.explain.what_if import Cycle
from verl_profiler.analysis.selection import Rows, Steps, by_run, steps_of, summed
from verl_profiler.analysis.staleness import staleness
from verl_profiler.analysis.staleness_causes import staleness_causes
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import share

_GENERATING = (
    "generating",
    "generating_unconsumed",
    "generating_aborted",
    "generating_dropped",
)
_OF_RANKS = ("training", "offload", "rank_transfer", "handover")
_TRAINER = (*_OF_RANKS, "driver")
# Rules whose advice accounts without a rule have.
_ADVICE_OF = {
    "offload": "offload",
    "rank_transfer": "transfer",
    "handover": "handover",
    "waiting_for_samples": "waits_for_rollout",
    "dispatch": "late_start",
    "unattributed": "unexplained",
}
_LIMITED = (
    "; here the rollouter runs no more than {:,} samples at once: raise "
    "async_training.concurrent_samples_per_replica"
)
# Runs whose engines' own times were not recorded.
_UNTIMED = "SELECT run FROM engine_calls GROUP BY run HAVING count(queue_us) = 0"
_SYNCED = "SELECT DISTINCT run FROM event_counts WHERE event = 'weight_sync'"
# Those whose findings are known: older runs lack what became of their samples.
ASYNCHRONOUS = """
SELECT run FROM asynchronous WHERE run IN (SELECT run FROM samples) ORDER BY run
"""


def asynchronous_findings(
    tables: Tables,
    ledger: Rows,
    steps: Steps = None,
    named_of: Found | None = None,
    known: Mapping[str, Cycle] | None = None,
) -> list[Finding]:
    """Return what bounds asynchronous runs, and what their rollout makes in vain.

    Steps get shorter by no more than `recoverable_s`: a faster rollout saves at most what the trainer
    waits, a faster trainer or sync at most its own time.

    Args:
        tables: Of the runs; those that did not record their samples have none.
        ledger: The rows of `bubble_ledger`.
        steps: Those to judge; None for all.
        named_of: What `culprits` returns of these steps.
        known: What `cycles` returns of these steps: a replay measures what devices are worth in the other pool.

    Returns:
        Most recoverable time first, of each run.
    """
    recorded, listed = {row["run"] for row in tables.rows(ASYNCHRONOUS)}, list[Finding]()
    if not recorded:
        return listed
    stale = by_run(staleness(tables, steps))
    # Without the syncs' own events it is not known when a sample became older.
    synced = {row["run"] for row in tables.rows(_SYNCED)}
    if named_of is None:
        named_of = culprits(tables, [], steps)
    limits = rollouters(tables)
    untimed = {row["run"] for row in tables.rows(_UNTIMED)}
    causes = by_run(row for row in staleness_causes(tables, steps) if row["run"] in synced)
    for run, pools in _pools_of(ledger, steps).items():
        if run in recorded:
            limited = _LIMITED.format(limits[run].at_once) if _is_limited(limits.get(run)) else ""
            cycle = (known or {}).get(run)
            split = [*_split_off(pools, cycle)]
            waits = _of_devices(
                pools,
                cycle,
                _waits(run in untimed, cycle),
                _trained(tables, pools),
                limited or (_LEND if any(fixes_of(["hybrid_switch"], Facts(tables, run))) else ""),
            )
            named = [
                *_of_culprits(pools, named_of.get(run, {})),
                *_of_engines(tables, pools, named_of.get(run, {})),
                *_of_staleness(pools, stale.get(run, []), causes.get(run, [])),
                *(each for each in split if each.recoverable_s > _UNBALANCED * each.step_s),
                *waits,
                *split,
            ]
            listed += in_order(without_superfluous({each.name: each for each in named}))
    return listed


def _is_limited(rollouter: Rollouter | None) -> bool:
    """Return whether a rollouter nearly always runs as many samples as it may, and its staleness limit rarely holds it."""
    return rollouter is not None and rollouter.at_most >= 0.8 and rollouter.paused < 0.1


def _waits(untimed: bool, cycle: Cycle | None) -> Rule:
    """Return the rule of the wait for the rollout, with what is unknown of the rollout."""
    rule, unknown = RULES["waits_for_rollout"], list[str]()
    if untimed:
        unknown.append(
            "Whether generate calls queue, prefill or decode was not recorded (profiler.events.engine_timing)."
        )
        rule = replace(rule, fixes=(*rule.fixes, *RULES["engine_bound"].fixes))
    if cycle is not None and cycle.refused is not None:
        unknown.append(
            f"What requests, tools and replicas cost could not be measured: {cycle.refused}."
        )
    return replace(rule, cause=" ".join(unknown))


def _pools_of(ledger: Rows, steps: Steps) -> dict[str, _Pools]:
    found: dict[str, _Pools] = {}
    for run, own in by_run(ledger).items():
        window = steps_of(steps, run)
        rows = [row for row in own if window is None or window[0] <= row["step"] <= window[1]]
        if rows:
            found[run] = _Pools(run, rows)
    return found


def with_the_rest(
    listed: Sequence[Finding],
    ledger: Rows,
    steps: Steps = None,
    known: Mapping[str, Cycle] | None = None,
) -> list[Finding]:
    """Add findings until those of an asynchronous run account for each `LEAST` of its trainer's devices.

    Args:
        listed: What `asynchronous_findings` returns.
        ledger: The rows of `bubble_ledger`.
        steps: Those that count.
        known: What `cycles` returns of these steps: how much shorter steps are without what the trainer does
            besides training is replayed, because the rollout goes on meanwhile.

    Returns:
        The findings by run, each with what it accounts for; what is work comes last.
    """
    found: list[Finding] = []
    for run, pools in _pools_of(ledger, steps).items():
        own = [each for each in listed if each.run == run]
        every = with_rest(pools.trainer, own)
        cycle = (known or {}).get(run)
        if cycle is not None:
            before = {each.name for each in own}
            every = [
                each if each.name in before else _replayed(each, cycle, pools.trainer)
                for each in every
            ]
        found += in_order(every)
    return found


def _replayed(finding: Finding, cycle: Cycle, trainer: _Pool) -> Finding:
    """Return a finding of what the trainer does besides training with the gain of a replay without it."""
    account = trainer.account_of(next(iter(finding.accounts))) if len(finding.accounts) == 1 else ""
    if not account or account in ("waiting_for_samples", *_GENERATING) or finding.rule.dominates:
        return finding
    state = TRAINING if account in _OF_RANKS else account
    spent_s = finding.recoverable_s
    return replace(finding, recoverable_s=cycle.trained_s(spent_s, state))


class _Pool(Account):
    """The account of a pool, in seconds per step of each of its devices."""

    work: ClassVar[str] = "pool_work"
    kinds: ClassVar[Mapping[str, Sequence[str]]] = {
        "training": ("training",),
        "generation": ("generating", "generating_unconsumed"),
        "weight sync": ("weight_sync",),
    }
    member: ClassVar[str] = "account"

    def __init__(self, run: str, rows: Rows) -> None:
        self.devices = rows[0]["devices"]
        segments = [
            {
                "category": row["account"],
                "step": row["step"],
                "duration_s": row["device_s"] / row["devices"],
                "phase": None,
                "name": row["pool"],
                "event": row.get("timer_of", row["account"]),
            }
            for row in rows
        ]
        super().__init__(run, segments)

    def account_of(self, category: str) -> str:
        """Return the account of a timer that `by_timer` has set apart, or of an account itself."""
        rows = self.segments.get(category)
        return rows[0]["event"] if rows else category

    def _on_trainer(self, category: str) -> bool:
        return self.account_of(category) == "driver"

    def rule_of(self, category: str) -> tuple[str, Rule]:
        if category not in ACCOUNTS:
            # A timer that `by_timer` has set apart.
            return super().rule_of(category)
        about = f"{category.replace('_', ' ')}: {ACCOUNTS[category]}"
        sentence = f"The trainer's devices spend {{lost_s}} per step ({{lost_share}}) on {about}."
        advice = RULES[_ADVICE_OF[category]].advice if category in _ADVICE_OF else ""
        return category, Rule(sentence, advice, ("bubble_ledger",), pooled=True)


class _Pools:
    """The pools of a run: the trainer's, and the rollout's if it has devices of its own."""

    def __init__(self, run: str, ledger: Rows) -> None:
        pools = {
            name: _Pool(run, [row for row in ledger if row["pool"] == name])
            for name in dict.fromkeys(row["pool"] for row in ledger)
        }
        self.rollout = pools.get("rollout")
        self.trainer = next(pool for name, pool in pools.items() if name != "rollout")
        self.shared = "shared" in pools
        self.idle = self.trainer.spent("waiting_for_samples")
        self.ahead = self.rollout.spent("staleness_limit") if self.rollout else 0.0
        # While devices that both share generate, the trainer has nothing to train on.
        self.waited = self.idle + (self.trainer.spent(*_GENERATING) if self.shared else 0.0)

    @property
    def in_turn(self) -> bool:
        return min(self.idle, self.ahead) > max(self.idle, self.ahead) / 2


# Not an anomaly: what has a cause of its own comes first.
_LAST = 0.0
# A split of devices is more than a detail of who waits if moving those of one replica saves so much of a step.
_UNBALANCED = 0.25
# What the trainer does in the timers of its steps, and the tokens that it trains.
_TRAINED = """
SELECT phase AS what, sum(duration_us) / 1e6 AS amount FROM phases
WHERE run = $run AND parent = 'step' AND step BETWEEN $first AND $last AND NOT validate GROUP BY ALL
UNION ALL
SELECT unnest(['prompts', 'all']), unnest([sum(prompt_tokens), sum(prompt_tokens + response_tokens)]) FROM requests
WHERE run = $run AND step BETWEEN $first AND $last AND NOT validate
"""


def _trained(tables: Tables, pools: _Pools) -> str:
    """Return what the trainer's time is for, by timer, and whether most of the tokens are those of prompts."""
    trainer = pools.trainer
    steps = {"run": trainer.run, "first": trainer.steps[0], "last": trainer.steps[-1]}
    amounts = {row["what"]: row["amount"] or 0.0 for row in tables.rows(_TRAINED, steps)}
    prompts, every = amounts.pop("prompts", 0.0), amounts.pop("all", 0.0)
    whole_s = trainer.step_s * len(trainer.steps)
    spent = [
        f"{phase} {share(spent_s / whole_s)}"
        for phase, spent_s in sorted(amounts.items(), key=lambda each: -each[1])
        if is_training(phase) and spent_s >= LEAST * whole_s
    ]
    texts = [f"Of the trainer's time: {', '.join(spent)}."] if spent else list[str]()
    if 2 * prompts > every > 0:
        texts.append(f"{share(prompts / every)} of the tokens are those of prompts.")
    return " ".join(texts)


def _of_devices(
    pools: _Pools, cycle: Cycle | None, waits: Rule, trained: str, reason: str
) -> Iterator[Finding]:
    """Yield who waits for whom, and what devices do in vain."""
    trainer, rollout = pools.trainer, pools.rollout
    found: list[tuple[str, _Pool, str, float]] = []
    if rollout and pools.in_turn:
        found.append(("waits_in_turn", trainer, "waiting_for_samples", pools.idle))
    elif pools.idle > pools.ahead:
        found.append(("waits_for_rollout", trainer, "waiting_for_samples", pools.idle))
    elif rollout:
        worked = [each for each in trainer.means if trainer.account_of(each) in _TRAINER]
        worked_s = trainer.spent(*worked)
        gain = worked_s if cycle is None else cycle.trained_s(worked_s)
        found.append(("waits_for_trainer", rollout, "staleness_limit", gain))
    found.append(("sync_bound", trainer, "weight_sync", trainer.spent("weight_sync")))
    served = rollout or trainer
    for name, account in (
        ("stale_samples", "generating_dropped"),
        ("wasted_aborts", "generating_aborted"),
    ):
        found.append((name, served, account, min(pools.waited, served.spent(account))))
    for name, pool, account, gain in found:
        rule = waits if name == "waits_for_rollout" else RULES[name]
        if name == "waits_for_trainer":
            rule = replace(rule, cause=trained)
        lost_s = pool.spent(account)
        if lost_s >= rule.least * pool.step_s and gain >= rule.least * trainer.step_s:
            culprit = replace(in_account(pool, account, pool.member), fixable=rollout is not None)
            yield finding_of(
                pool,
                name,
                rule,
                gain,
                pool.of(rule.categories),
                culprit,
                pool.by_step([account]),
                lost_s=lost_s,
                reason=reason if rollout else "",
                ranked_s=_LAST if account in ("waiting_for_samples", "staleness_limit") else None,
            )


def _of_culprits(
    pools: _Pools, named: Mapping[str, tuple[Culprit, float | None]]
) -> Iterator[Finding]:
    """Yield what single requests, places and tools cost, by the same rules as of a synchronous run."""
    for name, rule in RULES.items():
        of_cycle = (name, "cycle") in TEXTS
        # What engines lose has sentences of its own, `_of_engines`.
        elsewhere = rule.pooled or ((name, "engines") in TEXTS and not of_cycle)
        if name in named and not elsewhere:
            own = rule
            if of_cycle:
                own = replace(other_texts(name, "cycle"), categories=(), change=None, unseen=False)
            if name == "prompt_build":
                # The prompts are what blocks the loops then.
                own = replace(own, without=())
            if own.varies and named[name][0].who is None:
                # Healthy runs have some of it.
                own = replace(own, least=LARGE)
            made = of_rule(pools.trainer, name, own, None, named[name])
            if made is not None:
                yield made


def _of_engines(
    tables: Tables, pools: _Pools, named: Mapping[str, tuple[Culprit, float | None]]
) -> Iterator[Finding]:
    """Yield what the generating devices lose inside the engines, if the trainer waits for them.

    They cost what a replay without them measures, or at most all of that wait.
    """
    pool = pools.rollout or pools.trainer
    generating = pool.by_step(_GENERATING)
    rows = lost_by_engine(tables, (pool.steps[0], pool.steps[-1]), last_only=False)
    own = [row for row in rows if row["run"] == pool.run and row["step"] in generating]
    calls_s = summed(own, "calls_s", "step")
    for name in (name for name, of in TEXTS if of == "engines"):
        rule = other_texts(name, "engines")
        by_engine, lost_s = summed(own, name, "engine_name"), summed(own, name, "step")
        by_step = {
            step: lost_s.get(step, 0.0) / (calls_s.get(step) or 1.0) * generating[step]
            for step in pool.steps
        }
        whole = sum(by_step.values()) / len(pool.steps)
        _, measured_s = named.get(name, (None, None))
        if name == "engine_queue" and measured_s is not None:
            # It has the replica that queues longest.
            continue
        gain = pools.waited if measured_s is None else measured_s / len(pool.steps)
        enough = gain >= rule.least * pools.trainer.step_s and gain > 0
        if whole >= rule.least * pool.step_s and enough and any(by_engine.values()):
            most = next(iter(by_engine))
            engine = most if by_engine[most] > sum(by_engine.values()) / 2 else ""
            places = [Place(step, {engine: spent}) for step, spent in by_step.items()]
            kind = "replica" if engine else ""
            culprit = lost_to(pool.run, name, kind, engine, places).culprit
            own_s = pool.of(rule.categories)
            yield finding_of(pool, name, rule, gain, own_s, culprit, by_step, lost_s=whole, who="")


_LEND = "; let the trainer's replicas generate while it waits"


def _split_off(pools: _Pools, cycle: Cycle | None) -> Iterator[Finding]:
    """Yield whether the devices of one replica would be worth more in the pool that the other waits for.

    A replay with them moved measures it; training is taken to divide evenly over its devices.
    """
    trainer, rollout = pools.trainer, pools.rollout
    if rollout is None or pools.shared or pools.in_turn or cycle is None or cycle.refused:
        return
    to_rollout = pools.idle > pools.ahead
    account, pool, other, less, more, change = (
        ("waiting_for_samples", trainer, rollout, "trainer", "rollout", "one_replica_more")
        if to_rollout
        else ("staleness_limit", rollout, trainer, "rollout", "trainer", "one_replica_fewer")
    )
    idle = pool.spent(account) / pool.step_s * pool.devices
    if idle < cycle.model.replica_devices:
        return
    moved = CHANGES[change].changed(cycle.model, [cycle.model])
    saved = cycle.saved_with(moved.models[0]) if moved is not None else {}
    rule, gain = RULES["split_off"], fmean(saved.values()) if saved else 0.0
    if gain < rule.least * trainer.step_s:
        return
    places = [Place(step, {account: each}) for step, each in pool.by_step([account]).items()]
    yield finding_of(
        pool,
        "split_off",
        rule,
        gain,
        pool.of(rule.categories),
        lost_to(pool.run, "split_off", "", f"{less}'s devices", places).culprit,
        pool.by_step([account]),
        lost_s=pool.spent(account),
        who=f"{idle:.1f} of the {less}'s {pool.devices:g} devices are idle on average, while the "
        f"{more} has {other.devices:g}",
        reason=f"Move {cycle.model.replica_devices:g} of the {less}'s devices to the {more}.",
        ranked_s=_LAST,
    )


# Tokens more versions behind than this are stale: a step is one or two behind by design.
_STALE = 2


def _of_staleness(pools: _Pools, rows: Rows, causes: Rows) -> Iterator[Finding]:
    """Yield whether the trained tokens are too old, and what made them so."""
    rule, pool = RULES["too_stale"], pools.trainer
    versions = [row for row in rows if row["part"] == "versions"]
    tokens = sum(row["tokens"] for row in versions)
    stale = sum(row["tokens"] for row in versions if row["max_behind"] > _STALE)
    if not tokens or stale < rule.least * tokens:
        return
    maker, advice, cause = _maker_of(rows, causes)
    rule = replace(rule, cause=cause or rule.cause, advice=advice or rule.advice)
    culprit = Culprit("", maker, maker)
    yield finding_of(
        pool, "too_stale", rule, 0.0, {}, culprit, {}, lost_s=0.0, lost_share=stale / tokens
    )


def _maker_of(rows: Rows, causes: Rows) -> Texts:
    """Return the texts of what made samples old.

    Args:
        rows: Of `staleness`, of one run; where requests have no generate calls, they have the cause.
        causes: Of `staleness_causes`, of the same run; those of the stalest requests decide.
    """
    spanning = TEXTS["too_stale", "generating"]
    stalest = [row for row in causes if row["part"] == "request"]
    behind = summed(
        ({**row, "maker": TEXTS.get(("too_stale", row["cause"]), spanning)} for row in stalest),
        "behind",
        "maker",
    )
    most = next(iter(behind), spanning)
    if most != spanning and behind[most]:
        return most
    lengths = [
        {**row, **{each: row[each] * row["samples"] * stale for each in ("spanned", "waited")}}
        for row in rows
        if row["part"] == "length"
        for stale in [row["max_behind"] > _STALE]
    ]
    spanned = summed(lengths, "spanned", "what")
    whole = sum(spanned.values())
    if not any(behind.values()) and sum(row["waited"] for row in lengths) >= whole:
        return TEXTS["too_stale", "queue"]
    longest = max(spanned, key=lambda what: int(what.split()[0]), default="")
    if whole and spanned[longest] > whole / 2:
        long = TEXTS["too_stale", "length"]
        return long._replace(sentence=long.sentence.format(what=longest))
    return spanning
