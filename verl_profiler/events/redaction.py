"""Which values are written about a launch: only those that cannot be a credential.

Imported by both halves.  Numbers and flags of verl's and our own keys are written, and texts of the keys
in the lists below, where they look like a name, a file or a place in storage.  Everything else is
`<omitted>`: a credential cannot be recognized, since it has any form, under any key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from verl_profiler.events.json_values import is_list, is_mapping, is_tuple

OMITTED = "<omitted>"


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Keys of run.json whose texts are names, files or choices.
_RUN_TEXTS = _set(
    """
    experiment launched host cwd settings.output_dir settings.spool_dir
    settings.events.exclude
    settings.nsight.tool settings.nsight.directory
    settings.nsight.on_missing settings.nsight.nvtx
    training.model training.rollout training.agent_loop training.strategy training.trainer_mode
    training.project_name training.experiment_name training.logger training.memory.device
    training.memory.tags training.asynchronous.checkpoint_engine
    training.asynchronous.max_off_policy_strategy training.asynchronous.dynamic_schedule_policy
    """
)
# nsys has an option whose value is a list of variables.
_FREE = "settings.nsight.options."

# Groups of verl's config, and of ours, whose numbers and flags are settings of a training.
_GROUPS = _set(
    """
    actor_rollout_ref algorithm async_training critic custom_reward_function data distillation
    global_profiler profiler rehearsal reward reward_model rollout skip trainer transfer_queue
    """
)
# Below them, what users name themselves: `reward_kwargs`, `env_vars`; and what a `+` adds.
_USERS_OWN = re.compile(
    r"\.(?!engine_kwargs\b)\w*kwargs\b|\.env_vars\b|\.environment\b|\.options\b"
)
# Keys of a command whose texts are names, files or choices.
_COMMAND_TEXTS = _set(
    """
    actor_rollout_ref.actor.fsdp_config.dtype actor_rollout_ref.actor.fsdp_config.model_dtype
    actor_rollout_ref.actor.fsdp_config.strategy actor_rollout_ref.actor.kl_loss_type
    actor_rollout_ref.actor.loss_agg_mode actor_rollout_ref.actor.optim.lr_scheduler_type
    actor_rollout_ref.actor.optim.optimizer actor_rollout_ref.actor.policy_loss.loss_mode
    actor_rollout_ref.actor.strategy actor_rollout_ref.model.fused_kernel_options.impl_backend
    actor_rollout_ref.model.lora.type actor_rollout_ref.model.path
    actor_rollout_ref.model.target_modules actor_rollout_ref.ref.fsdp_config.strategy
    actor_rollout_ref.ref.strategy actor_rollout_ref.rollout.agent.agent_loop_config_path
    actor_rollout_ref.rollout.agent.default_agent_loop
    actor_rollout_ref.rollout.checkpoint_engine.backend
    actor_rollout_ref.rollout.disaggregation.transfer_backend actor_rollout_ref.rollout.dtype
    actor_rollout_ref.rollout.load_format actor_rollout_ref.rollout.logprobs_mode
    actor_rollout_ref.rollout.mode actor_rollout_ref.rollout.multi_turn.format
    actor_rollout_ref.rollout.multi_turn.function_tool_path
    actor_rollout_ref.rollout.multi_turn.interaction_config_path
    actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode
    actor_rollout_ref.rollout.multi_turn.tool_config_path
    actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side
    actor_rollout_ref.rollout.name actor_rollout_ref.rollout.router_config_path
    actor_rollout_ref.rollout.scheduling_policy algorithm.adv_estimator
    algorithm.filter_groups.metric algorithm.kl_ctrl.type algorithm.kl_penalty
    algorithm.rollout_correction.loss_type async_training.dynamic_schedule_policy
    critic.model.path critic.strategy custom_reward_function.name custom_reward_function.path
    data.audio_key data.custom_cls.name data.custom_cls.path data.image_key data.prompt_key
    data.reward_fn_key data.train_files data.truncation data.val_files data.video_key
    distillation.distillation_loss.loss_mode global_profiler.save_path global_profiler.tool
    hydra.run.dir model_engine profiler profiler.events.exclude
    profiler.nsight.directory profiler.nsight.tool profiler.output_dir
    profiler.spool_dir rehearsal
    reward.custom_reward_function.name reward.custom_reward_function.path
    reward.reward_manager.name reward.reward_model.model_path reward.reward_model.rollout.name
    reward_model.reward_manager trainer.default_local_dir trainer.device trainer.experiment_name
    trainer.logger trainer.project_name trainer.resume_mode
    trainer.v1.sampler.custom_sampler.name trainer.v1.sampler.custom_sampler.path
    trainer.v1.sampler.max_off_policy_strategy trainer.v1.trainer_mode
    transfer_queue.backend.storage_backend
    """
)

_KEY = re.compile(r"\w[\w.-]{0,127}")
_NAME = re.compile(r"(?:(?:env|file):)?[\w./~ =+,-]{1,1024}")
_MOMENT = re.compile(r"[\dT:.+-]{1,40}")
_VERSION = re.compile(r"[\w.+!-]{1,64}")
_PLACE = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE | re.DOTALL)
_USER = re.compile(r"[\w.-]{1,64}")
_URL_USER = re.compile(r"(?<=:/)(?!/)[^\s\"'<>]*@|(?<=://)[^\s\"'<>]*@")
_URL_PARAMETERS = re.compile(r"(:/[^\s?#\"']*)[?#][^\s\"']*")
_AUTHORITY = re.compile(r"[\w.:\[\]-]*")
_PLAIN = re.compile(
    r"[+-]?\d{1,12}(?:\.\d{0,12})?(?:e[+-]?\d{1,3})?|true|false|null|none|inf|", re.IGNORECASE
)
_ENGINES_OR_OURS = re.compile(r"profiler\.|rehearsal\.|.*\.engine_kwargs\.|.*\.override_config\.")
_OVERRIDE = re.compile(r"(?P<added>[+~]{0,2})(?P<key>\w[\w.]*)=(?P<value>.*)", re.DOTALL)
_PROGRAM = re.compile(
    r"-[mu]|(?:/?[\w.~-]+/)*python[\d.]*|verl(?:_profiler)?(?:\.\w+)+|[\w./~-]+\.py"
)


def public(text: str) -> str:
    """Return a name, a file or a place in storage, without what may be a credential.

    Of a URL, parameters are omitted, and user information that is more than the name of a user or of a
    container; of one for http, any, and the path, which is the whole secret of most webhooks.
    """
    url = _PLACE.fullmatch(text)
    if url is None:
        return text if _NAME.fullmatch(text) else OMITTED
    scheme, rest = url[1], url[2]
    place, *more = re.split(r"[?#]", rest, maxsplit=1)
    if more and "@" in rest:
        # A password with an unescaped character, or parameters: not to be told apart.
        return OMITTED
    user, at, place = place.rpartition("@")
    host, slash, path = place.partition("/")
    if _AUTHORITY.fullmatch(host) is None:
        return OMITTED
    is_web = scheme.lower() in ("http", "https")
    if user and (is_web or _USER.fullmatch(user) is None):
        user = OMITTED
    if path and (is_web or _NAME.fullmatch(path) is None):
        path = OMITTED
    return f"{scheme}://{user}{at}{host}{slash}{path}"


def without_url_secrets(text: str) -> str:
    """Return a text without user information and parameters of the URLs in it, one that became a path too."""
    return _URL_PARAMETERS.sub(r"\1", _URL_USER.sub(f"{OMITTED}@", text))


def recorded_values(value: Any, key: str) -> Any:
    """Return the part of a value of run.json that is written.

    Args:
        value: Plain containers, as deep as they are.
        key: Its dotted key in run.json.
    """
    if is_mapping(value):
        return {
            str(name) if _KEY.fullmatch(str(name)) else OMITTED: recorded_values(
                each, f"{key}.{name}"
            )
            for name, each in value.items()
        }
    if is_list(value) or is_tuple(value):
        return [recorded_values(each, key) for each in value]
    if value is None or isinstance(value, bool):
        return value
    if key.startswith(_FREE):
        return OMITTED
    if isinstance(value, int | float):
        return value
    if not isinstance(value, str):
        return OMITTED
    if key.startswith("versions."):
        return value if _VERSION.fullmatch(value) else OMITTED
    if key == "launched" and _MOMENT.fullmatch(value):
        return value
    return public(value) if key in _RUN_TEXTS else OMITTED


def recorded_command(words: Sequence[str]) -> list[str]:
    """Return a command line, word by word: the program, and the overrides that are known."""
    return [_recorded_word(word) for word in words]


def _recorded_word(word: str) -> str:
    if _PROGRAM.fullmatch(word):
        return word
    override = _OVERRIDE.fullmatch(word)
    if override is None:
        return OMITTED
    key, value = override["key"], override["value"]
    if key.partition(".")[0] not in _GROUPS and key not in _COMMAND_TEXTS:
        return OMITTED
    items = [item.strip(" \"'") for item in value.strip(" \"'()[]").split(",")]
    is_known = not override["added"] or _ENGINES_OR_OURS.match(key)
    if is_known and not _USERS_OWN.search(key) and all(map(_PLAIN.fullmatch, items)):
        return word
    if key in _COMMAND_TEXTS and all(public(item) == item for item in items):
        return word
    known = public(value) if key in _COMMAND_TEXTS else OMITTED
    return f"{word[: override.start('value')]}{known}"


def problem_of(error: BaseException) -> str:
    """Return an error's type and what is known of its reason; its message may quote a credential.

    The reason is that of the operating system, the code of a storage's answer, or a missing module.
    """
    found = [type(error).__name__]
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        found += [reason for reason in _reasons(each) if reason not in found]
        each = each.__cause__ or each.__context__
    return ": ".join(found)


def _reasons(error: BaseException) -> Iterator[str]:
    if isinstance(error, OSError) and isinstance(error.errno, int):
        yield os.strerror(error.errno)
    if (
        isinstance(error, ImportError)
        and isinstance(error.name, str)
        and _KEY.fullmatch(error.name)
    ):
        yield error.name
    answer = getattr(error, "response", None)
    code = answer.get("Error", {}).get("Code") if is_mapping(answer) else None
    status = getattr(error, "status", None) or getattr(error, "code", None)
    for known in (code, status):
        if isinstance(known, (int, str)) and re.fullmatch(r"[A-Za-z]{1,40}|\d{3}", str(known)):
            yield str(known)
