"""Records of iterations, and means over held-out prompts; docs/metrics.md lists every column."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import torch

from g2rpo_core.algorithm.advantage import correlation, standardized, without_spread
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.distributed.process_group import ALONE, ProcessGroup
from g2rpo_core.foundation.files import write_json
from g2rpo_core.foundation.runs import HELDOUT_CURVE, TRAINING_RECORDS
from g2rpo_core.models.generate import generate_images
from g2rpo_core.models.policy import Policy
from g2rpo_core.numerics.processes import describe_machine
from g2rpo_core.rewards.scoring import check_missing, score_table
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.sampling.schedule import even_sigmas
from g2rpo_core.sampling.settings import SamplingSettings

HELDOUT = "heldout_"  # begins the names of what is measured on held-out prompts
NO_SPREAD = "no_spread_"  # begins the names of the shares of groups whose rewards are all equal
# Before the first iteration
START = {"iteration": 0, "num_forward_evals": 0, "num_transitions": 0, "seconds": 0.0}


def reward_metrics(
    names: Sequence[str],
    rewards: torch.Tensor,
    advantages: torch.Tensor,
    granularities: tuple[int, ...],
    adv_clip_max: float,
    groups: int = 1,
) -> dict[str, float]:
    """Average this process's rewards [R, P, B, J, G], their spread, and how many advantages clip.

    advantages: of any shape; groups: parts of the G members whose rewards are compared
    (`Method.groups`).
    """
    # Within groups, not over all images: training learns only from what differs there
    alike = without_spread(rewards.unflatten(-1, (groups, -1))).float()
    return {
        **{f"reward_{name}": score.mean().item() for name, score in zip(names, rewards)},
        **{
            f"reward_std_{name}": score.std(-1).mean().item() for name, score in zip(names, rewards)
        },
        **{f"{NO_SPREAD}{name}": share.mean().item() for name, share in zip(names, alike)},
        **granularity_correlation(rewards, names, granularities),
        "adv_clip_share": (advantages.abs() >= adv_clip_max).float().mean().item(),
    }


def update_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Average the figures of all optimizer steps; the old-policy error is the first one's."""
    # Not averaged: after the first step the ratio is meant to differ from 1
    error = {key: value for key, value in updates[0].items() if key == "old_policy_ratio_error"}
    of_all = ("loss", "kl", "grad_norm")
    figures = [
        *of_all,
        *(key for key in updates[0] if key not in (*of_all, *error, "num_transitions")),
    ]
    return error | {key: sum(step[key] for step in updates) / len(updates) for key in figures}


def granularity_correlation(
    rewards: torch.Tensor, names: Sequence[str], granularities: tuple[int, ...]
) -> dict[str, float]:
    """Compare the scores of equal directions at each granularity with the finest (paper Fig. 3).

    rewards: [R, P, B, J, G]. `gap_<reward>_<granularity>`: its mean reward minus the finest's;
    `correlation_...`: the correlation with the finest's within a group, as a mean over groups. A
    group whose rewards are all equal counts as a correlation of 0.
    """
    # Standardized, as the advantages are: a coarse tail may shift all rewards and still rank alike
    scaled = standardized(rewards)
    metrics = {}
    for index, granularity in list(enumerate(granularities))[1:]:
        for name, raw, score in zip(names, rewards, scaled):
            together = correlation(score[:, :, index], score[:, :, 0])  # [P, B]
            metrics[f"gap_{name}_{granularity}"] = (raw[:, :, index] - raw[:, :, 0]).mean().item()
            metrics[f"correlation_{name}_{granularity}"] = together.mean().item()
    return metrics


def heldout_means(
    policy: Policy,
    prompts: EmbeddingStore,
    rewards: Mapping[str, Reward],
    count: int,
    sampling: SamplingSettings,
    processes: ProcessGroup = ALONE,
    max_missing: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return `heldout_<reward>`, its mean over the first `count` test prompts; collective.

    Their noise is never seen in training. max_missing: for each reward, the share of scores that
    may be missing (none if it is left out); the mean is over the others. If batches cannot be
    shared evenly, the last one is made more than once, because sharded weights need all processes
    in every call.
    """
    # Share the batches; who has none left repeats the last one, or the others would wait
    batch = sampling.decode_batch
    last = -(-min(count, len(prompts)) // batch) - 1
    mine = [min(turn + processes.rank, last) for turn in range(0, last + 1, processes.size)]
    batches = generate_images(
        policy, prompts, count, even_sigmas(sampling.steps, sampling.shift), 0, batch, mine
    )
    scored = {
        number: score_table(rewards, part, images) for number, (part, images) in zip(mine, batches)
    }
    # Put the scores of all processes in the order of prompts
    everyone = {
        number: table
        for of_process in processes.gather(scored)
        for number, table in of_process.items()
    }
    table = pd.concat([everyone[number] for number in range(last + 1)])
    # Over all processes: one of them may lack more than its share
    for name in rewards:
        missing = table[(table.reward == name) & table.score.isna()]
        check_missing(
            name,
            len(missing),
            min(count, len(prompts)),
            (max_missing or {}).get(name, 0.0),
            *missing.reason[:1],
        )
    return {f"{HELDOUT}{name}": float(table.score[table.reward == name].mean()) for name in rewards}


def write_records(
    records: list[dict],
    name: str,
    out: Path,
    timings: Path,
    warnings: list[tuple[int, str]],
    about: Mapping[str, object],
) -> None:
    """Write the records as a table into the run's folder `out`, with the curve of held-out rewards.

    Into `timings`, which DVC does not hash: seconds, and warnings by iteration, beside `about`.
    """
    table = pd.DataFrame(records)
    # Not in the table, which DVC hashes: seconds differ from run to run
    seconds = table.pop("seconds")
    out.mkdir(parents=True, exist_ok=True)
    table.to_parquet(out / TRAINING_RECORDS, index=False)
    measured = table[table.filter(like="heldout_").notna().all(axis=1)]
    columns = [
        "iteration",
        "num_forward_evals",
        "num_transitions",
        *measured.filter(like="heldout_"),
    ]
    write_json(out / HELDOUT_CURVE, measured[columns].to_dict("records"))
    drifted = (
        {"warnings": [f"iteration {iteration}: {text}" for iteration, text in warnings]}
        if warnings
        else {}
    )
    took = {"seconds": dict(zip(table.iteration.tolist(), seconds.round(3)))}
    write_json(timings / f"{name}.json", {**about, **describe_machine(), **drifted, **took})
