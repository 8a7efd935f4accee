"""Checks params.yaml, its profile, its prompt files and this machine before any work; `python -m stages.check`.

Prints one line for every problem that can be found, and exits with status 1 if there is any.
"""

import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from g2rpo_core.config import Profile, load_profile, load_run, profile_path, section_of
from g2rpo_core.data.embeddings import check_lengths
from g2rpo_core.data.prompts import load_prompts
from g2rpo_core.data.settings import EmbedSettings, PromptSettings
from g2rpo_core.errors import UserError, attempt
from g2rpo_core.files import read_yaml
from g2rpo_core.rewards import registry
from g2rpo_core.settings import name_problem
from g2rpo_core.training.tracking import MODULES, installed
from g2rpo_core.worlds.names import WORLD_NAMES
from stages.common import REPORTS, ends_in_one_line
from stages.prompts import Chosen, all_prompts, chosen_prompts

TINY_GIB = 2.0  # models, runs, evaluations and checkpoints of profile tiny, and room for DVC's cache of them


@ends_in_one_line
def main() -> None:
    if found := list(dict.fromkeys(complaints())):
        for complaint in found:
            print(f"error: {complaint}", file=sys.stderr)
        print(
            f"error: {len(found)} problems to fix before dvc repro" if len(found) > 1 else "",
            end="\n" * (len(found) > 1),
            file=sys.stderr,
        )
        sys.exit(1)
    run = load_run()
    print(f"profile {run.profile}: {', '.join(run.methods)} with seeds {', '.join(map(str, run.seeds))}")


def complaints() -> Iterator[str]:
    """Every problem, each once; parts that depend on a broken part are checked as far as possible."""
    yield from attempt(load_run)[1]
    name = _profile_named()
    if name is None:
        return
    path = profile_path(name)
    profile, problems = attempt(lambda: load_profile(path))
    yield from problems
    if prompts := section_of(path, "prompts", PromptSettings):
        yield from _of_prompts(name, prompts, section_of(path, "embed", EmbedSettings))
    if profile:
        yield from _of_machine(name, profile)


def _profile_named() -> str | None:
    """The profile that params.yaml names, if that much can be read."""
    try:
        data = read_yaml(Path("params.yaml"))
    except UserError:
        return None
    name = data.get("profile") if isinstance(data, dict) else None
    return name if isinstance(name, str) and not name_problem(name) else None


def _of_prompts(name: str, settings: PromptSettings, embed: EmbedSettings | None) -> Iterator[str]:
    on_disk = {testing: isinstance(settings.test if testing else settings.train, str) for testing in (False, True)}
    wrong = [
        text
        for testing, there in on_disk.items()
        if there
        for text in attempt(partial(all_prompts, settings, testing=testing))[1]
    ]
    yield from wrong
    if wrong or not all(on_disk.values()):  # a data set is for the stage `prompts` to fetch
        return
    chosen, problems = attempt(lambda: chosen_prompts(settings))
    yield from problems
    tokenizer = _tokenizer(name)
    if chosen and embed and tokenizer:
        prompts = [*chosen.train, *chosen.test]
        _, problems = attempt(lambda: check_lengths(prompts, tokenizer, embed.max_sequence_length))
        yield from problems
    if chosen and not problems and _changed_since(name, settings, chosen):
        files = " and ".join(
            source for source in (settings.train, settings.test) if isinstance(source, str) and source not in WORLD_NAMES
        )
        yield f"{files}: changed since prompts/{name} was made, which DVC does not see: dvc repro --force --single-item prompts"


def _changed_since(name: str, settings: PromptSettings, chosen: Chosen) -> bool:
    """Whether the stage `prompts` would make other prompts than it did, by the settings that it had: DVC would not run it."""
    made = [Path("prompts", name, f"{part}.parquet") for part in ("train", "test")]
    written = REPORTS / "profile.yaml"
    if not written.exists() or section_of(written, "prompts", PromptSettings) != settings:
        return False
    found, _ = attempt(lambda: [load_prompts(file) for file in made])
    return found is not None and found != [chosen.train, chosen.test]


def _tokenizer(name: str):
    """T5's tokenizer: from the profile's models if they exist; for profiles that build their own, the one that is built."""
    from transformers import AutoTokenizer

    from g2rpo_core.bases.table import base_of
    from g2rpo_core.common.model_store import LOCK, ModelStore
    from g2rpo_core.tiny_models.tokenizers import t5_tokenizer
    from g2rpo_core.worlds import table

    try:
        if (source := load_profile(profile_path(name)).models.source) != "hub":
            return t5_tokenizer(table.WORLDS[source])
        models = Path("models", name)
        if not (models / LOCK).exists():
            return None
        pipeline = ModelStore(models).folder("pipeline")
        return AutoTokenizer.from_pretrained(pipeline / base_of(pipeline).long_tokenizer)
    except (UserError, OSError, ValueError):
        return None


def _of_machine(name: str, profile: Profile) -> Iterator[str]:
    """What is not installed, not set, not found, or too small here."""
    for kept in profile.training.tracking.to:
        if not installed(kept):
            yield f"profiles/{name}.yaml: training.tracking.to: {kept} is not installed: pip install {MODULES[kept]}, or leave it out"
    used = dict.fromkeys([*profile.training.rewards, *profile.training.monitor.rewards, *profile.evaluation.rewards])
    for reward in used:
        yield from attempt(partial(registry.check, reward, profile.rewards))[1]
    free, needed = shutil.disk_usage(Path.cwd()).free / 2**30, disk_gib(profile)
    if free < needed:
        yield f"{Path.cwd()}: has {free:.1f} GiB free, but profile {name} needs about {needed:.1f}: make room, or work on another disk"


def disk_gib(profile: Profile) -> float:
    """What the profile writes in this folder while one run of its first method trains, by `g2rpo plan`."""
    if profile.models.source != "hub":
        return TINY_GIB
    from g2rpo_core.estimate.machines import Machines
    from g2rpo_core.estimate.plan import make_plan

    plan = make_plan(profile, next(iter(profile.methods)), Machines(1, 80.0))
    return sum(plan.disk_gib[part] for part in ("embeddings", "trained", "checkpoints"))  # models are in the Hugging Face cache


if __name__ == "__main__":
    main()
