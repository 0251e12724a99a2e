"""Run verl's trainer on this machine's CPU with profiling; no GPU needed.

The trainer, Ray, TransferQueue, FSDP2, agent loop and tools are the real ones;
by default the engine is the real SGLang. Sizes are tiny: a model of 0.3
million parameters, 8 prompts per step. Use it to try the profiler, or to test
a configuration before paying for a cluster. Hydra overrides at the end of the
command are passed to the trainer, for example

    verl-profiler rehearse --engine standin data.train_files=my.parquet

or the whole command of a training, whose sizes, model, engine and GPUs are
replaced by small ones:

    verl-profiler rehearse --engine standin -- python -m verl.trainer.main_ppo …
    verl-profiler rehearse --engine standin -- bash train.sh
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.resources
import importlib.util
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_profiler.cli.options import Argument
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ConfigError
from verl_profiler.events.remote import is_url
from verl_profiler.launch.command_line import CommandLine, check_overrides, is_command, parse
from verl_profiler.reading.formats.console_log import CONSOLE
from verl_profiler.rehearsal.environment import environment
from verl_profiler.rehearsal.process_tree import Children
from verl_profiler.rehearsal.progress import Progress, last_lines
from verl_profiler.render.visible import escaped, visible

# Print the current stage after this long without output, in s.
QUIET_S = 20.0
# Between two looks at the console.
_POLL_S = 0.5

# How long an interrupted trainer may take to shut Ray down.
INTERRUPT_GRACE_S = 15.0
_MAIN = "verl.trainer.main_ppo"
_TO_URL = re.compile(r"""\+*profiler\.output_dir=["']?[a-z][a-z0-9+.-]+://""")
# Trainers with main modules of their own, and overrides for a small run.
_OTHERS = {
    # Of verl 0.8 only.
    "main_ppo_sync": ("verl.trainer.main_ppo_sync", ()),
    "one_step_off": (
        "verl.experimental.one_step_off_policy.main_ppo",
        (
            # verl 0.9.1 looks for `ppo_trainer` in a folder of the working directory.
            "hydra.searchpath=[pkg://verl.trainer.config]",
            "rollout.n_gpus_per_node=1",
        ),
    ),
    "fully_async": (
        "verl.experimental.fully_async_policy.fully_async_main",
        (
            "rollout.n_gpus_per_node=1",
            # As many as the steps need.
            "rollout.total_rollout_steps=null",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "async_training.trigger_parameter_sync_step=2",
            "async_training.staleness_threshold=0.5",
        ),
    ),
}
# The others are verl's `trainer.v1.trainer_mode`.
TRAINERS = ("sync", "colocate_async", "separate_async", *_OTHERS)

# The override that leaves out the algorithm, tools and agent loop of a rehearsal without a command.
NO_EXAMPLE = "~rehearsal/example@_global_"

# Engines with models of their own.
_APART = r"(reward\.)?reward_model|distillation"
# Overrides, and what of them is not rehearsed.
_NOT_REHEARSED = (
    (
        rf"\+*({_APART})\.enabled?=true",
        "the reward model and the teachers of a distillation, which are engines with models of their own",
    ),
    (
        r"\+*(model_engine|.+\.strategy)=(?!dp$|fsdp2?$).+",
        "the trainer's engine, which needs GPUs; FSDP2 trains instead",
    ),
    (r"\+*data\.(image|video)_key=.+", "images and videos; the generated model reads text"),
)
# Sizes, machines and places of a real training, besides what the rehearsal group sets.
_SIZES = re.compile(
    r"trainer\.(nnodes|n_gpus_per_node|total_training_steps|total_epochs|logger|default_\w+_dir|resume_\w+"
    r"|save_freq|device|val_before_train)"
    r"|data\.(gen_batch_size|val_batch_size|truncation)"
    r"|model_engine|(.+\.)?(fsdp|fsdp_config|megatron|veomni|torchtitan|automodel)\..+"
    # An optimizer's own, of the engine that is replaced.
    r"|.+\.optim\.(?!(lr|betas|weight_decay|lr_warmup_steps|lr_warmup_steps_ratio)$).+"
    r"|(.+\.)?\w*(micro_batch_size|max_token_len|mini_batch_size|parallel_size|use_dynamic_bsz)\w*"
    r"|(actor_rollout_ref|critic)\.model\.(?!(lora_rank|lora_alpha|target_modules|exclude_modules)$).+"
    r"|(.+\.)?strategy"
    r"|actor_rollout_ref\.rollout\.(prompt_length|response_length|max_\w+|engine_kwargs\..+|mode|nnodes"
    r"|n_gpus_per_node|free_cache_engine|enable_\w+|checkpoint_engine\..+)"
    r"|rollout\.(nnodes|n_gpus_per_node|total_rollout_steps)"
    rf"|({_APART})\..+"
    r"|ray_kwargs\..+|(.+\.)?profiler(\..+)?|rehearsal(\..+)?|global_profiler\..+|hydra\.run\.dir"
)
# Kept where the user's file is on this machine.
_FILES = re.compile(r".*(_files|_path|\.path|_dir)")
_TOOLS = re.compile(r"actor_rollout_ref\.rollout\.multi_turn\.(function_tool|tool_config)_path")
_KEY = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[^=@]+)(@[^=]*)?(=(?P<value>.*))?", re.DOTALL)

# Engine → the option of the `rehearsal` group, and its description.
ENGINES = {
    "sglang": ("cpu", "the real SGLang on its CPU path"),
    "vllm": ("vllm", "the real vLLM, built for CPUs"),
    "standin": ("standin", "a small stand-in for the engine"),
}


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _directory(text: str) -> Path:
    if is_url(text):
        raise argparse.ArgumentTypeError(
            f"{text} is a URL. To upload the run, add the override profiler.output_dir={text}"
        )
    return Path(text)


ARGUMENTS = (
    Argument(
        "--engine",
        choices=sorted(ENGINES),
        default="sglang",
        help="the real SGLang or vLLM, or a stand-in engine that needs neither and takes half the time",
    ),
    Argument(
        "--trainer",
        choices=TRAINERS,
        metavar="TRAINER",
        default="sync",
        help=f"{', '.join(TRAINERS)}; all but sync and colocate_async have a separate replica "
        "(default: sync)",
    ),
    Argument("--steps", type=_positive, default=3, help="training steps (default: 3)"),
    Argument(
        "-o",
        "--out",
        "--output",
        type=_directory,
        metavar="DIR",
        help="run directory (default: logs/rehearsal[-N])",
    ),
    Argument(
        "--ranks", type=_positive, default=2, help="ranks, each with an engine replica (default: 2)"
    ),
    Argument("--workers", type=_positive, default=2, help="agent-loop workers (default: 2)"),
    Argument(
        "--profiler",
        default="multiturn",
        metavar="OPTION",
        help="option of the profiler config group, or none (default: multiturn)",
    ),
    Argument(
        "--print-command",
        action="store_true",
        help="print the trainer's command with its environment, without running it",
    ),
    Argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="Hydra overrides for the trainer, last; or `-- COMMAND`, a whole training command",
    ),
)


def run(args: argparse.Namespace) -> int:
    """Run the rehearsal; return 0 if the trainer exited with 0, else 1."""
    output = _output(args.out)
    if is_command(args.overrides):
        _take_over(args)
    else:
        check_overrides(args.overrides, "overrides, or `-- COMMAND`, a whole training command")
    command = build(args, output, os.environ)
    if args.print_command:
        print(command.shell())
        return 0
    _check_installed(args.engine)
    output.mkdir(parents=True, exist_ok=True)
    console = output / CONSOLE
    clock = _Clock()
    clock.print(f"rehearsal of verl's main_ppo with {ENGINES[args.engine][1]}")
    clock.print(f"the real trainer at tiny sizes; console output: {_short(console)}")
    with console.open("wb") as file:
        children = Children(command.arguments, {**os.environ, **command.variables}, file)
    status = _follow(children, console, clock)
    if status != 0:
        print_error(
            *last_lines(console),
            "",
            *([end] if (end := _what_failed(console)) else []),
            f"The trainer exited with status {status}.  Console output: {console}",
        )
        return 1
    clock.print("the trainer has exited")
    if args.profiler != "none":
        # As from a terminal: what is wrong with them is printed, and does not fail the rehearsal.
        cli = importlib.import_module("verl_profiler.cli")
        for command in ("summary", "report"):
            cli.run_command([command, str(output)])
    print(f"Results: {_short(output)}", flush=True)
    return 0


def _take_over(args: argparse.Namespace) -> None:
    """Set trainer and overrides from the command of a training, and print what is replaced.

    Raises:
        ConfigError: It is none, or of a trainer that cannot be rehearsed.
    """
    command = parse(args.overrides)
    trainer = trainer_of(command)
    if trainer is None:
        raise ConfigError(
            f"{command.entry} cannot be rehearsed: its trainer is none of {', '.join(TRAINERS)}.\n"
            "Rehearse its overrides: verl-profiler rehearse OVERRIDE …",
            "config-value",
        )
    given = dict(command.config)
    config: list[str] = []
    if "path" in given and Path(given["path"]).is_dir():
        given["path"] = str(Path(given["path"]).absolute())
        config = [f"--config-{option}={value}" for option, value in given.items()]
    elif given:
        print_error(
            "not rehearsed: the config of --config-name, whose folder is not here; verl's own is used"
        )
    if trainer != "sync":
        args.trainer = trainer
    kept, replaced = without_sizes(command.overrides)
    args.overrides = [*config, NO_EXAMPLE, *kept]
    if replaced:
        print(visible(f"replaced by small ones, or absent here: {' '.join(replaced)}"))
    for part in not_rehearsed(command.overrides):
        print(f"not rehearsed: {part}")


def _what_failed(console: Path) -> str:
    """Return the exception of the user's code that stands before the trainer's own; empty if unknown."""
    try:
        from verl_profiler.reading.formats.console_end import log_end
    except ImportError:
        # The reading half is not installed.
        return ""
    return log_end(console)


class _Clock:
    """Prints messages with the time since the start."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.last = self.begin

    def print(self, message: str) -> None:
        self.last = time.monotonic()
        print(visible(f"{self.last - self.begin:4.0f} s  {message}"), flush=True)


def _follow(children: Children, console: Path, clock: _Clock) -> int:
    """Print the milestones in the console until the program exits; return its status."""
    progress, line = Progress(), b""
    try:
        with console.open("rb") as file:
            while True:
                # Before its last lines are read.
                ended = children.program.poll() is not None
                for piece in file:
                    line += piece
                    if line.endswith(b"\n"):
                        message = progress.read(line.decode(errors="replace"))
                        line = b""
                        if message:
                            clock.print(message)
                if ended:
                    return children.program.returncode
                if time.monotonic() - clock.last > QUIET_S:
                    clock.print(f"… {progress.stage}")
                time.sleep(_POLL_S)
    except (KeyboardInterrupt, SystemExit):
        # Ctrl-C, or a signal that `tidy_ends` made an exception of.
        clock.print("interrupted; stopping the trainer and its child processes")
        children.interrupt(INTERRUPT_GRACE_S)
        clock.print(f"console log and events so far: {_short(console.parent)}")
        raise
    finally:
        children.end()


def _output(given: Path | None) -> Path:
    """Return the run directory: absolute, and new for this rehearsal."""
    if given is None:
        number, path = 1, Path("logs/rehearsal")
        while path.exists():
            number += 1
            path = Path(f"logs/rehearsal-{number}")
        return path.absolute()
    if given.exists() and not (given.is_dir() and not any(given.iterdir())):
        raise ConfigError(
            f"{given} already exists; each run needs a new directory.\n"
            "Choose another with --out DIR, or omit --out.",
            "output-exists",
        )
    return given.absolute()


def _check_installed(engine: str) -> None:
    needed = ["verl", "ray", "transfer_queue", "transformers"]
    if engine != "standin":
        needed.append(engine)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        other = " --engine standin does not need it." if missing == [engine] else ""
        raise ConfigError(
            f"a rehearsal needs {', '.join(missing)}, not installed for {sys.executable}."
            f"{other}\nIn a clone of verl-profiler, `make rehearsal ENGINE={engine}` installs all of it",
            "rehearsal-not-installed",
        )


def _short(path: Path) -> str:
    """Return a path relative to the current directory if it lies below it."""
    with contextlib.suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return visible(str(path))


@dataclass(frozen=True)
class Command:
    """A command line, and the environment variables to add for it."""

    arguments: tuple[str, ...]
    variables: dict[str, str]

    def shell(self) -> str:
        """Return the command in shell syntax."""
        variables = [f"{name}={_shell_quoted(value)}" for name, value in self.variables.items()]
        lines = ["env", *variables, " ".join(map(_shell_quoted, self.arguments[:3]))]
        lines += map(_shell_quoted, self.arguments[3:])
        return " \\\n    ".join(lines)


def _shell_quoted(word: str) -> str:
    """Quote an argument for a shell; control characters as `$'…'`."""
    if escaped(word) == word:
        return shlex.quote(word)
    quoted = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{escaped(quoted)}'"


def build(args: argparse.Namespace, output: Path, current: Mapping[str, str]) -> Command:
    """Return the command of a rehearsal in a run directory; the user's overrides come last, and win."""
    mode = [] if args.trainer == "sync" else [f"trainer.v1.trainer_mode={args.trainer}"]
    main, needed = _OTHERS.get(args.trainer, (_MAIN, mode))
    arguments = [sys.executable, "-m", main, f"+rehearsal={ENGINES[args.engine][0]}"]
    if args.profiler != "none":
        arguments += [f"+profiler={args.profiler}", f"profiler.output_dir={_quoted(output)}"]
        if any(_TO_URL.match(each) for each in args.overrides):
            # The run is written here, and uploaded.
            arguments.append(f"profiler.spool_dir={_quoted(output)}")
    arguments += [
        f"hydra.run.dir={_quoted(output / 'hydra')}",
        f"trainer.total_training_steps={args.steps}",
        f"trainer.n_gpus_per_node={args.ranks}",
        f"actor_rollout_ref.rollout.agent.num_workers={args.workers}",
        *needed,
        *args.overrides,
    ]
    return Command(tuple(arguments), environment(args.engine, current))


def trainer_of(command: CommandLine) -> str | None:
    """Return the trainer that a command starts, one of `TRAINERS`; None if no rehearsal knows its module."""
    names = {main: name for name, (main, _) in _OTHERS.items()}
    return names.get(command.entry, "sync" if command.entry == _MAIN else None)


def without_sizes(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a training's overrides into those that a rehearsal keeps and those that it replaces.

    Replaced are sizes, model, engine, GPUs, paths that are not on this machine, and profiling; what is
    rehearsed is the rest: rewards, tools, agent loops, algorithm, sampling.
    """
    from omegaconf import OmegaConf

    from verl_profiler.launch.dry_run import leaves

    file = importlib.resources.files("verl_profiler.configs") / "rehearsal" / "cpu.yaml"
    toy = {key for key, _ in leaves(OmegaConf.create(file.read_text()))}
    kept: list[str] = []
    replaced: list[str] = []
    for override in overrides:
        found = _KEY.fullmatch(override)
        key, value = (found["key"], found["value"] or "") if found else (override, "")
        here = _is_here(value)
        lost = _FILES.fullmatch(key) is not None and not here and value not in ("null", "")
        own = key in toy and not (here and not key.startswith("actor_rollout_ref.model."))
        (replaced if own or lost or _SIZES.fullmatch(key) else kept).append(override)
        if lost and _TOOLS.fullmatch(key):
            # So that tools are called; the generated model learns what is there.
            kept.append(f"{key}=rehearsal")
    if any(override.startswith(("data.train_files=", "data.val_files=")) for override in kept):
        # Prompts of their own, in the generated model's tokens.
        kept += ["data.max_prompt_length=2048", "data.filter_overlong_prompts=true"]
    return kept, replaced


def _is_here(value: str) -> bool:
    """Whether a path, or each path of a list, exists on this machine."""
    paths = [each.strip(" '\"") for each in value.strip("[]").split(",")]
    return all(each and Path(each).expanduser().exists() for each in paths)


def not_rehearsed(overrides: Sequence[str]) -> list[str]:
    """Return which parts of a training are left out of its rehearsal, and why."""
    return [
        part
        for pattern, part in _NOT_REHEARSED
        if any(re.match(pattern, override, re.IGNORECASE) for override in overrides)
    ]


def _quoted(path: Path) -> str:
    """Quote a path as a value of a Hydra override, whose grammar reserves `=`, `,` and others."""
    text = str(path)
    if re.fullmatch(r"[\w/.+-]+", text):
        return text
    # A backslash is literal in Hydra's grammar, except before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), text)
    return f"'{escaped}'"
