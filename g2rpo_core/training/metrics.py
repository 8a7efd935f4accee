"""Records of iterations, and means over held-out prompts; docs/metrics.md lists every column."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import torch

from g2rpo_core.algorithm.advantage import correlation, standardized, without_spread
from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.data.prompts import Prompt
from g2rpo_core.distributed.checkpoint import checkpoints
from g2rpo_core.distributed.process_group import ALONE, ProcessGroup
from g2rpo_core.foundation.files import read_json, write_json
from g2rpo_core.foundation.runs import HELDOUT_CURVE, TRAINING_RECORDS
from g2rpo_core.models.generate import generate_images
from g2rpo_core.models.policy import Policy
from g2rpo_core.numerics.processes import describe_machine
from g2rpo_core.rewards.scoring import check_missing, score_table
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.sampling.schedule import even_sigmas
from g2rpo_core.sampling.settings import SamplingSettings
from g2rpo_core.training.learning import GAIN, GAIN_ERROR, GAP, GAP_ERROR

OTHER = "other "  # begins the names of rewards under another prompt
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


class HeldOut:
    """Measures the first `count` test prompts when called; collective.

    Returns `heldout_<reward>`, its mean. Their noise is never seen in training, and always the
    same. max_missing: for each reward, the share of scores that may be missing (none if it is left
    out); the mean is over the others.

    With `folder`, a run's scratch folder, which keeps its first scores: at first also how far
    trained rewards are above those for another prompt, `prompt_gap_<reward>`, with its standard
    error; then `gain`, of their weighted sum since, and `gain_error`, both paired by prompt.
    """

    def __init__(
        self,
        policy: Policy,
        prompts: EmbeddingStore,
        rewards: Mapping[str, Reward],
        count: int,
        sampling: SamplingSettings,
        processes: ProcessGroup = ALONE,
        max_missing: Mapping[str, float] | None = None,
        weights: Mapping[str, float] | None = None,
        folder: Path | None = None,
    ):
        self.policy, self.prompts, self.rewards, self.sampling = policy, prompts, rewards, sampling
        self.count, self.processes = min(count, len(prompts)), processes
        self.max_missing, self.weights = max_missing or {}, weights or {}
        self.start = folder and folder / "start.json"
        self.new = folder is None or not checkpoints(folder)

    def __call__(self) -> dict[str, float]:
        own = {name: self.rewards[name] for name, weight in self.weights.items() if weight}
        asked = own if self.start and self.new and self.count > 1 else {}
        table = self._scores(asked)
        means = {}
        for name in self.rewards:
            scores = table[table.reward == name]
            # Over all processes: one of them may lack more than its share
            missing = scores[scores.score.isna()]
            check_missing(
                name,
                len(missing),
                self.count,
                self.max_missing.get(name, 0.0),
                *missing.reason[:1],
            )
            means[f"{HELDOUT}{name}"] = float(scores.score.mean())
        if self.start is None:
            return means
        # [prompt, reward]
        scores = table.pivot(index="prompt_id", columns="reward", values="score")
        total = sum(weight * scores[name] for name, weight in self.weights.items())
        if self.new:
            self.new = False
            if self.processes.rank == 0:
                write_json(self.start, total.dropna().to_dict())
            self.processes.barrier()
            for name in (name for name in asked if f"{OTHER}{name}" in scores):
                above = scores[name] - scores[f"{OTHER}{name}"]
                means |= {
                    f"{GAP}{name}": float(above.mean()),
                    f"{GAP_ERROR}{name}": float(above.sem()),
                }
            return means
        rise = (total - pd.Series(read_json(self.start, dict), dtype=float)).dropna()
        return means | {GAIN: float(rise.mean()), GAIN_ERROR: float(rise.sem())}

    def _scores(self, others: Mapping[str, Reward]) -> pd.DataFrame:
        """Return `score_table` of all prompts; collective.

        others: rewards that score each image also under another prompt, as `other <name>`. If
        batches cannot be shared evenly, the last one is made more than once, because sharded
        weights need all processes in every call.
        """
        # Share the batches; who has none left repeats the last one, or the others would wait
        batch, processes, sampling = self.sampling.decode_batch, self.processes, self.sampling
        last = -(-self.count // batch) - 1
        mine = [min(turn + processes.rank, last) for turn in range(0, last + 1, processes.size)]
        sigmas = even_sigmas(sampling.steps, sampling.shift)
        batches = generate_images(self.policy, self.prompts, self.count, sigmas, 0, batch, mine)
        scored, before = {}, list[Prompt]()
        for number, (part, images) in zip(mine, batches):
            tables = [score_table(self.rewards, part, images)]
            # Only prompts that were asked about before: rewards keep the encodings of a call, which
            # differ in their last bits with its size, and a run that resumes does not ask this
            wrong = [*part[1:], part[0]] if len(part) > 1 else before[-1:]
            if others and wrong:
                table = score_table(others, wrong, images)
                names = [prompt.id for prompt in part] * len(others)
                tables.append(table.assign(reward=OTHER + table.reward, prompt_id=names))
            before, scored[number] = part, pd.concat(tables)
        # Put the scores of all processes in the order of prompts
        everyone = {
            number: table
            for of_process in processes.gather(scored)
            for number, table in of_process.items()
        }
        return pd.concat([everyone[number] for number in range(last + 1)])


def write_records(
    records: list[dict],
    name: str,
    out: Path,
    timings: Path,
    warnings: list[tuple[int, str]],
    about: Mapping[str, object],
    trained: str,
) -> None:
    """Write the records as a table into the run's folder `out`, with the curve of held-out rewards.

    trained: what trains, in words, the table's attribute of that name. Into `timings`, which DVC
    does not hash: seconds, and warnings by iteration, beside `about`.
    """
    table = pd.DataFrame(records)
    table.attrs["trained"] = trained
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
