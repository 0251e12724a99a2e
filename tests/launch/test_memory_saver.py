"""Memory settings: each becomes keys of the host; pitfalls are errors or warnings."""

import importlib.util
import os

import pytest

from verl_profiler.errors import ConfigError
from verl_profiler.launch.memory_saver import apply, facts
from verl_profiler.launch.settings import MemorySaverSettings

omegaconf = pytest.importorskip("omegaconf")


def config(engine="sglang", device="cuda", overrides=(), **rollout):
    """The part of verl 0.9's config that matters here, with its defaults."""
    return omegaconf.OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {
                    "name": engine,
                    "free_cache_engine": True,
                    "gpu_memory_utilization": 0.5,
                    "engine_kwargs": {"vllm": {}, "sglang": {}, "trtllm": {}},
                    **rollout,
                },
                "actor": {"fsdp_config": {"param_offload": False, "optimizer_offload": False}},
                "ref": {"fsdp_config": {"param_offload": False, "optimizer_offload": False}},
                "model": {"lora_rank": 0, "lora": {"rank": 0, "merge": False}},
            },
            "critic": {"fsdp": {"param_offload": False, "optimizer_offload": False}},
            "trainer": {"device": device, "v1": {"trainer_mode": "sync"}},
            "ray_kwargs": {"ray_init": {}},
            "hydra": {"overrides": {"task": list(overrides)}},
        }
    )


@pytest.fixture(autouse=True)
def saver(monkeypatch):
    """`torch_memory_saver` is installed, or what the returned function is called with."""
    find, found = importlib.util.find_spec, [True]
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: found[-1] if name == "torch_memory_saver" else find(name),
    )
    return found.append


def test_keys_of_another_version_or_engine_are_found_too():
    """verl up to 0.7 has the critic's below the model; for vLLM the switch is its sleep mode."""
    given, vllm = config(), config("vllm")
    given["critic"] = {"model": {"fsdp_config": {"param_offload": False}}}
    apply(given, MemorySaverSettings(param_offload=True))
    # verl has no key in its YAML for it, but its dataclass takes it.
    apply(vllm, MemorySaverSettings(enable_memory_saver=True))

    assert given["critic"]["model"]["fsdp_config"]["param_offload"] is True
    assert vllm["actor_rollout_ref"]["rollout"]["enable_sleep_mode"] is True


SAVER = {"enable_memory_saver": True, "free_cache_engine": True}


@pytest.mark.parametrize("own", [(), ("profiler.memory_saver.{}={}",)])
@pytest.mark.parametrize(
    ("name", "value", "theirs"),
    [
        ("gpu_memory_utilization", 0.4, 0.6),
        # With it, what else the preset asks for has no effect, and nothing to refuse.
        ("free_cache_engine", True, False),
    ],
)
def test_verls_own_key_overrides_ours_with_a_line(name, value, theirs, own):
    """It is the more specific one, also if the command line has both; the command goes on."""
    key = f"actor_rollout_ref.rollout.{name}"
    words = [f"{key}={theirs}", *(word.format(name, value) for word in own)]
    given = config(overrides=words, **{name: theirs})
    warnings = apply(given, MemorySaverSettings(**{**SAVER, name: value}))

    assert theirs == given["actor_rollout_ref"]["rollout"][name]
    assert [f"is overridden by {key}={str(theirs).lower()}" in each for each in warnings] == [True]


def test_one_step_off_refuses_a_release():
    """Its config sets `free_cache_engine: False`, "Must be turned off!"; the fully asynchronous one does not."""
    given = config(free_cache_engine=False)
    given["rollout"] = {"nnodes": 1, "n_gpus_per_node": 8}
    with pytest.raises(ConfigError, match="weights cannot be synchronized"):
        apply(given, MemorySaverSettings(free_cache_engine=True))

    assert given["actor_rollout_ref"]["rollout"]["free_cache_engine"] is False
    assert [] == apply(given, MemorySaverSettings())
    given["async_training"] = {}
    apply(given, MemorySaverSettings(free_cache_engine=True))


@pytest.mark.parametrize(
    ("requested", "given", "text"),
    [
        ({"enable_memory_saver": False}, config(), "nothing will be freed"),
        (
            {"free_cache_engine": True},
            config(engine_kwargs={"sglang": {"enable_memory_saver": False}}),
            "nothing will be freed",
        ),
        ({"enable_memory_saver": False}, config("vllm"), "rollout.enable_sleep_mode"),
        (
            {"enable_memory_saver": True, "free_cache_engine": False},
            config(),
            "verl would never use it",
        ),
        ({"enable_memory_saver": True}, config("standin"), "has no memory saver"),
        ({"enable_memory_saver": True}, config(device="cpu"), "memory_saver_rehearsal"),
    ],
)
def test_a_requested_setting_without_effect_is_an_error(requested, given, text):
    """The message has what would happen instead, and what to set."""
    with pytest.raises(ConfigError) as caught:
        apply(given, MemorySaverSettings(**requested))

    assert text in str(caught.value)
    assert "\n" in str(caught.value)


def test_pitfalls_of_the_hosts_own_settings_are_warnings(saver):
    """The run continues as it would without the profiler."""
    given = config(engine_kwargs={"sglang": {"enable_memory_saver": False}})
    (nothing_freed,) = apply(given, MemorySaverSettings())
    saver(None)
    (not_installed,) = apply(config(), MemorySaverSettings())

    assert "nothing will be freed" in nothing_freed
    assert "torch_memory_saver is not installed" in not_installed
    assert not_installed.endswith("(memory-saver)")


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("place", ["environment", "runtime_env"])
def test_expandable_segments_are_found_wherever_they_are_set(name, place):
    """In the driver's environment, and in what Ray passes to the workers."""
    given = config()
    value = "max_split_size_mb:128,expandable_segments:True"
    if place == "environment":
        os.environ[name] = value
    else:
        given["ray_kwargs"]["ray_init"]["runtime_env"] = {"env_vars": {name: value}}

    (warning,) = apply(given, MemorySaverSettings())
    with pytest.raises(ConfigError, match="expandable_segments:True"):
        apply(given, MemorySaverSettings(enable_memory_saver=True))

    assert name in warning
    assert [] == apply(config(device="cpu"), MemorySaverSettings())


def test_offload_policy_overrides_the_offloads():
    """FSDP2's own offloading turns verl's off."""
    given = config()
    given["actor_rollout_ref"]["actor"]["fsdp_config"]["offload_policy"] = True
    with pytest.raises(ConfigError, match="turns param_offload and optimizer_offload off"):
        apply(given, MemorySaverSettings(param_offload=True))


def test_an_adapter_keeps_its_base_weights():
    """With SGLang, verl releases the cache only; a merged adapter counts as none."""
    given = config()
    given["actor_rollout_ref"]["model"]["lora_rank"] = 16
    kept = facts(given)["tags"]
    given["actor_rollout_ref"]["model"]["lora"]["merge"] = True
    vllm = config("vllm")
    vllm["actor_rollout_ref"]["model"]["lora_rank"] = 16

    assert ["kv_cache"] == kept
    assert ["kv_cache", "weights"] == facts(vllm)["tags"]
    assert ["kv_cache", "weights"] == facts(given)["tags"]
