"""Define `g2rpo probe`: what a training can learn from, how the reward spreads by step, or how much gradients of prompts agree."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from g2rpo_core.cli.options import read_profile
from g2rpo_core.common.runs import BASE
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.profiles import OF_BASE, folders_of
from g2rpo_core.inference.runs import find_start, find_weights, sampling_of

if TYPE_CHECKING:  # these import torch and diffusers, which would slow down --help
    from g2rpo_core.inference.gradients import Signal
    from g2rpo_core.inference.probe import Step


def probe(
    profile: Annotated[str | None, typer.Option(help="default: the one in params.yaml")] = None,
    study: Annotated[
        str | None,
        typer.Option(help="instead of --profile: a study's entries and changes, or one of its bases, as my_study/base-2"),
    ] = None,
    run: Annotated[str, typer.Option(help="`base`, a run such as g2rpo-1, or a folder with `transformer` or `lora`")] = BASE[0],
    prompts: Annotated[int, typer.Option(help="how many training prompts, the first ones")] = 16,
    group: Annotated[int | None, typer.Option(help="members of a group (default: training.num_generations)")] = None,
    granularities: Annotated[str, typer.Option(help="step sizes of the tails, rising, the finest first")] = "1,2,3",
    seed: Annotated[int, typer.Option(help="of the noise")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: a GPU if there is one)")] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="measure how much the policy gradients of prompts agree, for what they cost")
    ] = False,
    steps: Annotated[str, typer.Option(help="with --gradients: SDE steps, rising, as 2,3,4 (default: all)")] = "",
    methods: Annotated[
        str, typer.Option(help="with --gradients: also whole iterations of these entries, as mix_grpo,dance_grpo")
    ] = "",
    judge: Annotated[
        str | None, typer.Option(help="with --gradients: a reward to whose gradient the angle is measured, such as verifier")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON list instead of the table")] = False,
) -> None:
    """Measure, before training, how the reward spreads when noise is added at each step, and whether coarse tails rank as fine ones do.

    It needs the stages models and embed. Noise that changes no score teaches nothing: choose sde_steps where the spread is large for its
    evaluations, and coarser tails where their correlation with the finest is near 1. With --gradients it measures instead how much the
    gradients of different prompts agree, by step, by tail alone and all together, and of whole methods: what teaches most for its
    evaluations.

    Example: g2rpo probe --prompts 32 --granularities 1,3
    """
    name, settings = read_profile(profile, study)
    members = group or settings.training.num_generations
    tails = _parse_rising(granularities, 1)
    if not tails or prompts < 1 or members < 2:
        raise UserError(
            "probe: --granularities are rising whole numbers from 1, as 1,2,3; --prompts is at least 1, --group at least 2"
        )
    if study and OF_BASE in study and run != BASE[0]:
        raise UserError(f"probe: --run {run}: with --study {study} only its base, {BASE[0]}, is probed")
    sampling = sampling_of(run, name, settings)
    title, weights, folders = f"{study or name}, {run}", find_weights(run, name), folders_of(name, study)
    rewards = " + ".join(settings.training.rewards)
    asked = SimpleNamespace(**locals())
    if gradients:
        _print_gradients(asked, _measure_gradients(asked))
    else:
        _print_steps(asked, *_measure_steps(asked))


def _measure_gradients(asked: SimpleNamespace) -> "list[Signal]":
    """Load policy, rewards and prompts, and probe the gradients of every step and of the named entries."""
    from tqdm import tqdm

    from g2rpo_core.algorithm.methods import METHODS
    from g2rpo_core.common.model_store import ModelStore
    from g2rpo_core.common.processes import device_of
    from g2rpo_core.config.profile import ResolvedRun
    from g2rpo_core.data.embeddings import EmbeddingStore
    from g2rpo_core.inference.gradients import SIZE, Gradients, load_policy, probe_method, probe_steps
    from g2rpo_core.rewards import registry

    # Check what is asked
    profile, sampling = asked.settings, asked.sampling
    names = [word for word in asked.methods.split(",") if word]
    if unknown := [name for name in names if name not in profile.methods]:
        raise UserError(f"probe: --methods {unknown[0]}: profile {asked.name} has only {', '.join(profile.methods)}")
    chosen = _parse_rising(asked.steps, 0) if asked.steps else tuple(range(sampling.steps - 1))
    if not chosen or chosen[-1] > sampling.steps - 2:
        raise UserError(f"probe: --steps are rising whole numbers from 0 to {sampling.steps - 2}, as 2,3,4 (got {asked.steps!r})")
    if asked.prompts < 3:
        raise UserError(f"probe: --prompts {asked.prompts}: --gradients compares prompts: give at least 3")
    # Every step with each tail alone and all together, and whole iterations
    sets = list(dict.fromkeys([*((each,) for each in asked.tails), asked.tails]))
    training = profile.training.model_copy(update={"num_generations": asked.members})
    method = METHODS["g2rpo"].changed(tree={"sde_steps": chosen, "granularities": asked.tails})
    of_steps = ResolvedRun(method, sampling, training, "g2rpo", None, "g2rpo")
    size = {"num_generations": asked.group} if asked.group else {}
    runs = [profile.run(name) for name in names]
    entries = [replace(run, training=run.training.model_copy(update=size)) for run in runs]
    # Load
    where, (folder, embeddings) = device_of(asked.device), asked.folders
    store, pipeline = EmbeddingStore(embeddings / "train"), ModelStore(folder).folder("pipeline")
    store.load_encoders(pipeline, where)
    wanted = [*(name for each in (of_steps, *entries) for name in each.training.rewards), *([asked.judge] if asked.judge else [])]
    rewards = registry.load(list(dict.fromkeys(wanted)), folder, where, profile.rewards)
    count = range(min(asked.prompts, len(store)))

    def gradients_of(entry: ResolvedRun) -> Gradients:
        # one policy after the other: an entry may have its own guidance, size or LoRA
        start = find_start(entry.training.start, asked.name, profile)
        policy = load_policy(pipeline, asked.weights, entry, asked.seed, where, start)
        return Gradients(policy, entry, store, rewards, asked.judge, asked.seed, SIZE)

    found = probe_steps(gradients_of(of_steps), tqdm(count, desc="steps", disable=None), sets)
    return found + [probe_method(gradients_of(entry), tqdm(count, desc=entry.name, disable=None)) for entry in entries]


def _print_gradients(asked: SimpleNamespace, signals: "list[Signal]") -> None:
    """Print a line for every signal, or the JSON list."""
    if asked.as_json:
        rows = [asdict(each) | {"per_evaluation": each.per_evaluation, "per_compute": each.per_compute} for each in signals]
        print(json.dumps(rows))
        return
    print(f"{asked.title}: gradient of {asked.rewards} over {signals[0].prompts} prompts, groups of {asked.members}")
    print("what         tails    SNR²      ±     NFE  per 1,000  compute  per 1,000" + ("  cosine" if asked.judge else ""))
    for each in signals:
        what, tails = each.method if each.step is None else f"step {each.step}", ",".join(map(str, each.granularities))
        numbers = f"{each.snr2:7.3f} {each.error:6.3f} {each.evaluations:7,.0f} {1000 * each.per_evaluation:10.4f}"
        cosine = f" {each.cosine:7.2f}" if each.cosine is not None else "       -" if asked.judge else ""
        print(f"{what:12} {tails:6} {numbers} {each.compute:8,.0f} {1000 * each.per_compute:10.4f}{cosine}")


def _parse_rising(text: str, least: int) -> tuple[int, ...]:
    """Return rising whole numbers from `least`; none if the text is anything else."""
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        return ()
    return numbers if list(numbers) == sorted(set(numbers)) and numbers[0] >= least else ()


def _measure_steps(asked: SimpleNamespace) -> "tuple[list[Step], int]":
    """Load policy, rewards and prompts, and probe every step; return the steps, and how many prompts were used."""
    from tqdm import tqdm

    from g2rpo_core.common.model_store import ModelStore
    from g2rpo_core.common.processes import device_of
    from g2rpo_core.data.embeddings import EmbeddingStore
    from g2rpo_core.inference.probe import probe
    from g2rpo_core.models.policy import Policy, policy_settings
    from g2rpo_core.rewards import registry

    where, (folder, embeddings), sampling = device_of(asked.device), asked.folders, asked.sampling
    store, weighted = EmbeddingStore(embeddings / "train"), asked.settings.training.rewards
    store.load_encoders(ModelStore(folder).folder("pipeline"), where)
    policy = Policy.load(
        ModelStore(folder).folder("pipeline"), asked.weights, **policy_settings(sampling.drawn, where, **sampling.size)
    )
    rewards = registry.load(list(weighted), folder, where, asked.settings.rewards)
    count = min(asked.prompts, len(store))
    first = tqdm(range(count), desc="prompts", disable=None)
    return probe(policy, rewards, weighted, store, first, sampling, asked.tails, asked.members, asked.seed), count


def _print_steps(asked: SimpleNamespace, steps: "list[Step]", count: int) -> None:
    """Print a line for every step, or the JSON list."""
    if asked.as_json:
        print(json.dumps([asdict(step) for step in steps]))
        return
    coarse = asked.tails[1:]
    print(f"{asked.title}: training reward {asked.rewards} over {count} prompts, groups of {asked.members}")
    print(
        "step  sigma  spread  "
        + "  ".join(f"NFE λ={each}" for each in asked.tails)
        + "".join(f"  corr. λ={each}   gap λ={each}" for each in coarse)
    )
    for step in steps:
        evaluations = "  ".join(f"{step.evaluations[each]:7,}" for each in asked.tails)
        agreement = "".join(f"  {step.correlation[each]:9.2f}  {step.gap[each]:+8.4f}" for each in coarse)
        print(f"{step.step:4}  {step.sigma:5.3f}  {step.spread:6.4f}  {evaluations}{agreement}")
