"""What findings give to paste, a row per fix: verl reads it, it differs, and it changes no training."""

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from cached_runs import REHEARSED

from verl_profiler.analysis.explain.fixes import FILES, FIXES, Facts, fixes_of
from verl_profiler.analysis.explain.rules import RULES
from verl_profiler.reading.reader import load

ROLLOUT = "actor_rollout_ref.rollout"
SAMPLER = "trainer.v1.sampler.custom_sampler"
SWITCH = "trainer.v1.separate_async.hybrid_rollout.enable_switch"


@dataclass(frozen=True)
class Row:
    """Settings of a run that needs the fix, and changes with which it is pointless or harmful."""

    settings: dict
    pastes: dict
    never: tuple
    measured: tuple = ()
    never_measured: tuple = ()
    engine: str = "sglang"
    trainer: str = "sync"
    unread_by: tuple = ()


BUILT_IN = {
    SAMPLER: False,
    "algorithm.filter_groups.enable": False,
    "trainer.v1.sampler.sync_refill_failed_groups": False,
}
ROWS = {
    "fast_poll": Row(
        BUILT_IN,
        {f"{SAMPLER}.path": "fast_poll.py", f"{SAMPLER}.name": "FastPoll"},
        tuple({key: True} for key in BUILT_IN),
        unread_by=("separate_async", "colocate_async", "legacy"),
    ),
    "agent_workers": Row(
        {
            f"{ROLLOUT}.agent.num_workers": 2,
            "data.train_batch_size": 64,
            "algorithm.filter_groups.enable": False,
            "trainer.v1.sampler.sync_refill_failed_groups": False,
        },
        {f"{ROLLOUT}.agent.num_workers": 4},
        (
            {"algorithm.filter_groups.enable": True},
            {"data.train_batch_size": 2},
            {f"{ROLLOUT}.agent.num_workers": 64},
        ),
    ),
    "spread_calls": Row(
        {f"{ROLLOUT}.router_config_path": False},
        {f"{ROLLOUT}.router_config_path": "spread_calls.yaml"},
        ({f"{ROLLOUT}.router_config_path": True},),
        measured=(1,),
        never_measured=(),
    ),
    "running_limit": Row(
        {f"{ROLLOUT}.max_num_seqs": 32},
        {f"{ROLLOUT}.max_num_seqs": 64},
        ({f"{ROLLOUT}.max_num_seqs": 1024}, {f"{ROLLOUT}.max_num_seqs": 40}),
        measured=(40,),
        never_measured=(32,),
        unread_by=("trtllm",),
    ),
    "engine_memory": Row(
        {f"{ROLLOUT}.gpu_memory_utilization": 0.5},
        {f"{ROLLOUT}.gpu_memory_utilization": 0.8},
        ({f"{ROLLOUT}.gpu_memory_utilization": 0.8}, {f"{ROLLOUT}.gpu_memory_utilization": 0.9}),
    ),
    "reward_workers": Row(
        {"reward.num_workers": 8}, {"reward.num_workers": 16}, ({"reward.num_workers": None},)
    ),
    "rarer_validation": Row(
        {"trainer.test_freq": 1},
        {"trainer.test_freq": 5},
        # In three steps only the last one, in which verl validates for any positive value.
        ({"trainer.test_freq": 10}, {"trainer.test_freq": 3}, {"trainer.test_freq": -1}),
        measured=(1, 2, 3),
        never_measured=(1,),
    ),
    "rarer_checkpoints": Row(
        {"trainer.save_freq": 2},
        {"trainer.save_freq": 10},
        ({"trainer.save_freq": 3}, {"trainer.save_freq": -1}),
        measured=(1, 2, 3),
        never_measured=(1, 2),
    ),
    "engine_timing": Row(
        {"profiler.events.engine_timing": False},
        {"profiler.events.engine_timing": "true"},
        ({"profiler.events.engine_timing": True},),
        unread_by=("trtllm",),
    ),
    "hybrid_switch": Row(
        {
            "actor_rollout_ref.hybrid_engine": True,
            SWITCH: False,
            SAMPLER: False,
            f"{ROLLOUT}.disaggregation.enabled": None,
        },
        {SWITCH: "true"},
        (
            {"actor_rollout_ref.hybrid_engine": False},
            {SWITCH: True},
            {SAMPLER: True},
            {f"{ROLLOUT}.disaggregation.enabled": True},
        ),
        trainer="separate_async",
        unread_by=("sync", "colocate_async", "legacy"),
    ),
}
_V1_TRAINER = "trainer/ppo/v1/trainer_base.py"
_VLLM = "workers/rollout/vllm_rollout/vllm_async_server.py"
_SGLANG = "workers/rollout/sglang_rollout/async_sglang_server.py"
# Where verl 0.9.1 reads each fix.
READ_AT = {
    "fast_poll": [f"{_V1_TRAINER}:151"],
    "agent_workers": ["experimental/agent_loop/agent_loop.py:1210"],
    "spread_calls": ["workers/rollout/llm_server.py:511"],
    "running_limit": [f"{_VLLM}:333", f"{_SGLANG}:329"],
    "engine_memory": [f"{_VLLM}:340", f"{_SGLANG}:317"],
    "reward_workers": ["experimental/reward_loop/reward_loop.py:326"],
    "rarer_validation": [f"{_V1_TRAINER}:492"],
    "rarer_checkpoints": [f"{_V1_TRAINER}:482"],
    # A setting of the profiler.
    "engine_timing": [],
    "hybrid_switch": ["trainer/ppo/v1/trainer_separate_async.py:95"],
}
# What is trained: the data, its filters, its lengths and turns, its loss.
TRAINED = (
    *("data.", "algorithm.", "critic.", "actor_rollout_ref.actor", "actor_rollout_ref.model"),
    *(f"{ROLLOUT}.{name}" for name in ("n", "multi_turn", "response_length", "temperature")),
    *("trainer.balance_batch", "trainer.v1.sampler.max_off_policy", "parameter_sync_step"),
)


def pasted(name, settings=None, *, measured=None, version="0.9.1", engine=None, trainer=None):
    """Return the overrides of a fix for a run with these settings."""
    row = ROWS[name]
    mode = trainer or row.trainer
    launch = {
        "versions": {"verl": version},
        "training": {
            "rollout": engine or row.engine,
            "use_v1": mode != "legacy",
            "trainer_mode": "sync" if mode == "legacy" else mode,
            "settings": row.settings if settings is None else settings,
        },
    }
    facts = Facts(SimpleNamespace(launches={"run": launch}, rows=lambda *_: []), "run")
    facts.measured = lambda _: list(row.measured if measured is None else measured)
    overrides, files = fixes_of([name], facts)
    assert set(files) == (set(FIXES[name].files) if overrides else set())
    return dict(each.split("=", 1) for each in overrides)


def test_every_fix_has_a_row_and_a_finding():
    """Rules refer to fixes by name; nothing else makes an override."""
    assert set(FIXES) == set(ROWS)
    assert set(FIXES) == {name for rule in RULES.values() for name in rule.fixes}


@pytest.mark.parametrize("name", ROWS)
def test_a_fix_is_given_only_where_it_can_work(name):
    """Not with what is pointless, was not recorded, or is read by another trainer, engine or version."""
    row = ROWS[name]
    wanted = {key: str(value) for key, value in row.pastes.items()}

    assert wanted == pasted(name)
    assert set(FIXES[name].keys) == set(wanted)
    assert all(str(row.settings.get(key)).lower() != value for key, value in wanted.items())
    for change in row.never:
        assert {} == pasted(name, {**row.settings, **change}), change
    for key in row.settings:
        known = {each: value for each, value in row.settings.items() if each != key}
        assert {} == pasted(name, known), key
    if row.measured:
        assert {} == pasted(name, measured=row.never_measured)
    for version in (None, "0.8.0", "0.10.0", "0.9.1.dev0", "1.0.0"):
        assert {} == pasted(name, version=version)
    assert {} == pasted(name, trainer="unknown")
    for other in row.unread_by:
        of_engine = other in ("sglang", "vllm", "trtllm")
        assert {} == pasted(name, **{"engine" if of_engine else "trainer": other})


@pytest.mark.parametrize("name", ROWS)
def test_a_fix_changes_nothing_that_is_trained(name):
    """Lengths, turns, filters, oversampling and staleness are advice in words."""
    assert not [key for key in FIXES[name].keys if key.startswith(TRAINED) or "num_warmup" in key]


@pytest.mark.parametrize("name", ROWS)
def test_verl_reads_a_fix_where_the_table_has_it(name):
    """The line in the installed verl contains the last part of the key."""
    verl = pytest.importorskip("verl")
    if importlib.metadata.version("verl") != "0.9.1":
        pytest.skip("the lines are of verl 0.9.1")
    for place in READ_AT[name]:
        file, _, line = place.rpartition(":")
        text = (Path(verl.__file__).parent / file).read_text().splitlines()[int(line) - 1]

        for key in FIXES[name].keys:
            *_, outer, last = key.split(".")
            assert last in text, (key, text)
            assert outer != "custom_sampler" or outer in text


def test_each_measured_fact_is_read_from_a_real_run():
    """The queries are valid; a run without recorded settings gives no fix."""
    run = load([REHEARSED])
    (label,) = run.tables.launches
    facts = Facts(run.tables, label)
    overrides, _ = fixes_of(FIXES, facts)

    assert [] == overrides
    facts.setting = lambda key: {"trainer.test_freq": 1}.get(key, 2)
    facts.off = lambda *_: True
    values = {name: fix.values(facts) for name, fix in FIXES.items()}
    assert {"trainer.test_freq": 5} == values["rarer_validation"]
    # Its requests have several calls, more than two of them at once on a replica.
    assert values["spread_calls"]
    assert {f"{ROLLOUT}.max_num_seqs": 4} == values["running_limit"]


@pytest.fixture(scope="module")
def compose():
    hydra = pytest.importorskip("hydra")
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        yield lambda *words: hydra.compose("ppo_trainer", overrides=list(words))


def test_hydra_accepts_the_fixes(compose):
    """It refuses a key that is not in verl's config."""
    from omegaconf import OmegaConf

    pastes = {key: value for row in ROWS.values() for key, value in row.pastes.items()}
    wanted = {key: str(value).lower() for key, value in pastes.items()}
    config = compose("+profiler=multiturn", *(f"{key}={value}" for key, value in pastes.items()))

    assert wanted == {key: str(OmegaConf.select(config, key)).lower() for key in wanted}
    with pytest.raises(Exception, match="no_such_key"):
        compose("trainer.no_such_key=1")


def test_run_json_has_the_settings_that_decide(compose):
    """Each one that a row names, from verl's own config; a path only as set or not."""
    from verl_profiler.launch.training_facts import training_facts

    plain = training_facts(compose())["settings"]
    own = training_facts(
        compose(
            f"{SAMPLER}.path=/secret/sampler.py",
            f"{SAMPLER}.name=Mine",
            "algorithm.filter_groups.enable=true",
        )
    )["settings"]

    deciding = {key for row in ROWS.values() for key in row.settings}
    assert {key for key in deciding if not key.startswith("profiler.")} <= set(plain)
    assert [False, False] == [plain[SAMPLER], plain["algorithm.filter_groups.enable"]]
    assert [True, True] == [own[SAMPLER], own["algorithm.filter_groups.enable"]]
    assert "secret" not in str(own)


def test_pasted_files_are_loaded_by_verl_and_change_what_they_are_for(tmp_path, reported):
    """The sampler its polling only, where no groups are filtered or refilled; the router a full replica."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    found = reported("fixes_on_verl.py", tmp_path)
    # Advice in words that only some trainers can follow.
    assert found["sync_is_naive"]
    for name in ("weight_sync", "sync_bound"):
        assert "rollout has devices of its own, a faster rollout.checkpoint_engine" in (
            RULES[name].advice.replace("Where", "where")
        )
    differing = found["differing"]

    assert 0.2 == found["polls"]
    # The sizes count where groups are filtered or refilled only (replay_buffer.py, `sample`).
    assert {"poll_interval"} == {*differing[""]} - {"train_batch_size", "gen_batch_size"}
    assert "filter_groups_metric" in differing["filtered"]
    assert "sync_refill_failed_groups" in differing["refilled"]
    # Of 4 in the other one, 1.25 * 4 + 2 = 7 may stay.
    assert [True, True, False] == found["stays"]
    assert 5 == found["calls"]
