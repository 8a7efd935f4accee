"""Check params.yaml, its profile, its prompt files and this machine before any work.

Prints one line for every problem that can be found, and exits with status 1 if there is any.
"""

import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer

from g2rpo_core.architectures.table import (
    ARCHITECTURES,
    check_trainable,
    read_architecture,
    read_shape,
)
from g2rpo_core.config import Profile, load_profile, load_run, profile_path, section_of
from g2rpo_core.data.choice import Chosen, all_prompts, chosen_prompts
from g2rpo_core.data.embeddings import check_lengths
from g2rpo_core.data.prompts import load_prompts
from g2rpo_core.data.settings import EmbedSettings, PromptSettings
from g2rpo_core.estimate.machines import Machines
from g2rpo_core.estimate.plan import make_plan
from g2rpo_core.estimate.tracing import shape_of, transformer_parameters
from g2rpo_core.foundation.errors import UserError, attempt
from g2rpo_core.foundation.files import read_yaml
from g2rpo_core.foundation.settings import name_problem
from g2rpo_core.foundation.texts import echo
from g2rpo_core.hub.model_store import LOCK, ModelStore
from g2rpo_core.models.loading import add_adapter, describe_trained, lora_config
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.rewards import registry
from g2rpo_core.tasks import TASK_NAMES, table
from g2rpo_core.tiny_models.build import maker_of
from g2rpo_core.tiny_models.settings import BASES, BuiltModels
from g2rpo_core.tiny_models.tokenizers import TOKENIZERS
from g2rpo_core.tracking.display import not_installed
from g2rpo_core.training.learning import settings_lines
from stages.entry import arguments, ends_in_one_line
from stages.paths import REPORTS

# Models, runs, evaluations and checkpoints of profile tiny, and room for DVC's cache of them
TINY_GIB = 2.0


@ends_in_one_line
def main() -> None:
    arguments(__doc__)
    if problems := list(dict.fromkeys(complaints())):
        for problem in problems:
            echo(f"error: {problem}", file=sys.stderr)
        if len(problems) > 1:
            echo(f"error: {len(problems)} problems to fix before dvc repro", file=sys.stderr)
        sys.exit(1)
    run = load_run()
    echo(
        f"profile {run.profile}: {', '.join(run.methods)} with seeds "
        f"{', '.join(map(str, run.seeds))}"
    )
    profile = load_profile(profile_path(run.profile))
    learning: dict[tuple[str, ...], list[str]] = {}  # what is said -> of which methods
    trainings = {method: profile.run(method).training for method in run.methods}
    # Once for methods that train the same modules: each makes a model
    trained = {
        lora: attempt(partial(trained_modules, profile, lora))[0]
        for lora in {each.lora for each in trainings.values()}
    }
    for method, training in trainings.items():
        said = (*filter(None, [trained[training.lora]]), *settings_lines(training))
        learning.setdefault(said, []).append(method)
    for said, methods in learning.items():
        echo(f"can {', '.join(methods)} learn?", *(f"  {line}" for line in said))


def complaints() -> Iterator[str]:
    """Yield every problem, some more than once.

    Parts that depend on a broken part are checked as far as possible.
    """
    run, problems = attempt(load_run)
    yield from problems
    name = _profile_named()
    if name is None:
        return
    path = profile_path(name)
    profile, problems = attempt(lambda: load_profile(path))
    yield from problems
    chosen = None
    if prompts := section_of(path, "prompts", PromptSettings):
        chosen, problems = _choice(prompts)
        yield from problems
        if chosen:
            yield from _prompt_problems(name, path, prompts, chosen)
    if run and profile and run.methods and profile.models.source == "hub":
        pipeline = profile.models.repos["pipeline"]
        yield from attempt(lambda: check_trainable(pipeline.repo, pipeline.architecture))[1]
        if pipeline.folder is not None:
            yield from attempt(lambda: read_shape(Path(pipeline.place)))[1]
    if profile:
        if chosen:
            yield from _unscored_prompts(name, profile, chosen)
        yield from _untrained(name, profile)
        yield from _machine_problems(name, profile)


def trained_modules(profile: Profile, lora: LoraSettings | None) -> str:
    """Say which modules train; UserError for LoRA targets without one, and an unknown shape."""
    if isinstance(profile.models, BuiltModels):
        task = table.TASKS[profile.models.source]
        caption = next(iter(task.distinct_scenes(1, 0, testing=False, without=()))).caption
        transformer = maker_of(profile.models)(task, [caption]).parts["transformer"]
        if lora:
            base = ARCHITECTURES[BASES[profile.models.base]]
            transformer.requires_grad_(False)
            add_adapter(transformer, lora_config(base, lora))
        trained = {
            name: each.numel()
            for name, each in transformer.named_parameters()
            if each.requires_grad
        }
        return describe_trained(trained)
    architecture, shape = shape_of(profile)
    return transformer_parameters(architecture, shape.transformer, lora).trains


def _untrained(name: str, profile: Profile) -> Iterator[str]:
    """Yield the LoRA targets that no module of the base model is called."""
    shape, _ = attempt(lambda: bool(isinstance(profile.models, BuiltModels) or shape_of(profile)))
    adapters = dict.fromkeys(profile.run(entry).training.lora for entry in profile.methods)
    for lora in filter(None, adapters if shape else ()):
        for problem in attempt(partial(trained_modules, profile, lora))[1]:
            yield f"profiles/{name}.yaml: {problem}"


def _profile_named() -> str | None:
    """Return the profile that params.yaml names, if that much can be read."""
    data = attempt(lambda: read_yaml(Path("params.yaml")))[0]
    name = data.get("profile") if isinstance(data, dict) else None
    return name if isinstance(name, str) and not name_problem(name) else None


def _choice(settings: PromptSettings) -> tuple[Chosen | None, list[str]]:
    """Choose from both files, each read once; None for a data set, which stage `prompts` fetches.

    Also return the problems of each.
    """
    read = {
        part: attempt(partial(all_prompts, settings, testing=part == "test"))
        for part in ("train", "test")
        if isinstance(getattr(settings, part), str)
    }
    found = {part: prompts for part, (prompts, _) in read.items() if prompts}
    if len(found) < 2:
        return None, [text for _, problems in read.values() for text in problems]
    return attempt(lambda: chosen_prompts(settings, found))


def _prompt_problems(
    name: str, path: Path, settings: PromptSettings, chosen: Chosen
) -> Iterator[str]:
    """Yield problems of the chosen prompts, and of those that older files made."""
    problems: list[str] = []
    embed, tokenizer = section_of(path, "embed", EmbedSettings), _tokenizer(name)
    if embed and tokenizer:
        prompts = [*chosen.train, *chosen.test]
        _, problems = attempt(lambda: check_lengths(prompts, tokenizer, embed.max_sequence_length))
        yield from problems
    if not problems and _changed_since(name, settings, chosen):
        files = " and ".join(
            source
            for source in (settings.train, settings.test)
            if isinstance(source, str) and source not in TASK_NAMES
        )
        yield (
            f"{files}: changed since prompts/{name} was made, which DVC does not see: "
            "dvc repro --force --single-item prompts"
        )


def _changed_since(name: str, settings: PromptSettings, chosen: Chosen) -> bool:
    """Tell whether the stage `prompts` would now make other prompts with the same settings.

    DVC does not see that a file changed.
    """
    made = [Path("prompts", name, f"{part}.parquet") for part in ("train", "test")]
    written = REPORTS / "profile.yaml"
    if not written.exists() or section_of(written, "prompts", PromptSettings) != settings:
        return False
    existing, _ = attempt(lambda: [load_prompts(file) for file in made])
    return existing is not None and existing != [chosen.train, chosen.test]


def _unscored_prompts(name: str, profile: Profile, chosen: Chosen) -> Iterator[str]:
    """Yield the rewards that cannot score some prompts, by their texts: training ends at the first.

    Prompts of a data set are not known yet.
    """
    training = profile.training
    judged = dict.fromkeys(
        [*training.rewards, *training.monitor.rewards, *profile.evaluation.rewards]
    )
    for part, rewards, prompts in (
        ("train", training.rewards, chosen.train),
        ("test", judged, chosen.test),
    ):
        largest = (
            dict.fromkeys(rewards, 0.0)
            if part == "train"
            else registry.max_missing([*rewards], profile.rewards)
        )
        for reward in (each for each in rewards if each in registry.REWARDS):
            said = [
                (prompt.text, registry.REWARDS[reward].problem_of_prompt(prompt.text))
                for prompt in prompts
            ]
            without = [(text, problem) for text, problem in said if problem]
            if len(without) > largest[reward] * len(prompts):
                text, problem = without[0]
                yield (
                    f"profiles/{name}.yaml: prompts.{part}: {reward} has no score for "
                    f"{len(without)} of {len(prompts)} prompts, "
                    f"such as {text[:80]!r}: {problem}"
                )


def _tokenizer(name: str):
    """Return a function that counts a prompt's tokens.

    Built here, or read from the profile's models; None if they are missing or damaged.
    """
    try:
        if settings := section_of(profile_path(name), "models", BuiltModels):
            base = ARCHITECTURES[BASES[settings.base]]
            return base.counter(
                TOKENIZERS[base.tokenizers[base.long_tokenizer]](table.TASKS[settings.source])
            )
        models = Path("models", name)
        if not (models / LOCK).exists():
            return None
        pipeline = ModelStore(models).folder("pipeline")
        base = read_architecture(pipeline)
        return base.counter(AutoTokenizer.from_pretrained(pipeline / base.long_tokenizer))
    except (UserError, OSError, ValueError):
        return None


def _machine_problems(name: str, profile: Profile) -> Iterator[str]:
    """Yield what this machine lacks: packages, environment variables, servers, disk space."""
    for tracker in profile.training.tracking.to:
        if lacking := not_installed(tracker):
            yield f"profiles/{name}.yaml: training.tracking.to: {lacking}"
    used = dict.fromkeys(
        [*profile.training.rewards, *profile.training.monitor.rewards, *profile.evaluation.rewards]
    )
    for reward in used:
        yield from attempt(partial(registry.check, reward, profile.rewards))[1]
    # Training says in full what keeps a profile from being planned, and evaluation needs no plan
    method, machines = next(iter(profile.methods)), Machines(1, 80.0)
    disks = attempt(lambda: make_plan(profile, method, machines).disks)[0] or {}
    needed = disks.get("here", 0.0) if profile.models.source == "hub" else TINY_GIB
    if (free := shutil.disk_usage(Path.cwd()).free / 2**30) < needed:
        yield (
            f"{Path.cwd()}: has {free:.0f} GiB free, but a run of profile {name} with DVC's copies "
            f"needs about {needed:.0f} here, beside models and rewards in HF_HOME: make room, or "
            "work on another disk"
        )


if __name__ == "__main__":
    main()
