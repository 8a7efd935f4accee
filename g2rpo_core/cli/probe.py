"""`g2rpo probe`: which denoising steps can teach, and which granularities agree, by sampling alone."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from g2rpo_core.common.runs import BASE
from g2rpo_core.errors import UserError
from g2rpo_core.inference.runs import folder_of


def probe(
    profile: Annotated[str | None, typer.Option(help="default: the one in params.yaml")] = None,
    run: Annotated[str, typer.Option(help="`base`, a run such as g2rpo-1, or a folder with `transformer` or `lora`")] = BASE[0],
    prompts: Annotated[int, typer.Option(help="how many training prompts, the first ones")] = 16,
    group: Annotated[int | None, typer.Option(help="members of a group (default: training.num_generations)")] = None,
    granularities: Annotated[str, typer.Option(help="step sizes of the tails, rising, the finest first")] = "1,2,3",
    seed: Annotated[int, typer.Option(help="of the noise")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: a GPU if there is one)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON list instead of the table")] = False,
) -> None:
    """Measure, before training, how the reward spreads when noise is added at each step, and whether coarse tails rank as fine ones do.

    It needs the stages models and embed. Noise that changes no score teaches nothing: choose sde_steps where the spread is large for its
    evaluations, and coarser tails where their correlation with the finest is near 1.

    Example: g2rpo probe --prompts 32 --granularities 1,3
    """
    from g2rpo_core.config import load_profile, load_run, profile_path

    name = profile or load_run().profile
    settings = load_profile(profile_path(name))
    try:
        tails = tuple(int(word) for word in granularities.split(","))
    except ValueError:
        tails = ()
    members = group or settings.training.num_generations
    if not tails or list(tails) != sorted(set(tails)) or tails[0] < 1 or prompts < 1 or members < 2:
        raise UserError(
            "probe: --granularities are rising whole numbers from 1, as 1,2,3; --prompts is at least 1, --group at least 2"
        )
    folder = folder_of(run, name)

    from tqdm import tqdm

    from g2rpo_core.common.devices import device_of
    from g2rpo_core.common.model_store import ModelStore
    from g2rpo_core.data.embeddings import DTYPES, EmbeddingStore
    from g2rpo_core.inference.probe import probe as steps_of
    from g2rpo_core.models.policy import Policy
    from g2rpo_core.rewards import registry

    where = device_of(device)
    sampling, weights, models = settings.sampling, settings.training.rewards, Path("models", name)
    store = EmbeddingStore(Path("embeddings", name, "train"))
    policy = Policy.load(
        ModelStore(models).folder("pipeline"), folder, height=sampling.height, width=sampling.width, guidance=sampling.guidance,
        dtype=DTYPES[sampling.dtype], device=where,
    )  # fmt: skip
    rewards = registry.load(list(weights), models, where, settings.rewards)
    first = tqdm(range(min(prompts, len(store))), desc="prompts", disable=None)
    found = steps_of(policy, rewards, weights, store, first, sampling, tails, members, seed)
    if as_json:
        print(json.dumps([asdict(step) for step in found]))
        return
    print(f"{name}, {run}: training reward {' + '.join(weights)} over {min(prompts, len(store))} prompts, groups of {members}")
    coarse = tails[1:]
    print(
        "step  sigma  spread  "
        + "  ".join(f"NFE λ={each}" for each in tails)
        + "".join(f"  corr. λ={each}   gap λ={each}" for each in coarse)
    )
    for step in found:
        evaluations = "  ".join(f"{step.evaluations[each]:7,}" for each in tails)
        agreement = "".join(f"  {step.correlation[each]:9.2f}  {step.gap[each]:+8.4f}" for each in coarse)
        print(f"{step.step:4}  {step.sigma:5.3f}  {step.spread:6.4f}  {evaluations}{agreement}")
