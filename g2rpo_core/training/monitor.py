"""Measurements on held-out prompts during training."""

from collections.abc import Mapping

import pandas as pd

from g2rpo_core.data.embeddings import EmbeddingStore
from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.models.generate import generate_images
from g2rpo_core.models.policy import Policy
from g2rpo_core.rewards.scoring import check_missing, score_table
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.sampling.schedule import even_sigmas
from g2rpo_core.sampling.settings import SamplingSettings


def heldout_means(
    policy: Policy,
    prompts: EmbeddingStore,
    rewards: Mapping[str, Reward],
    count: int,
    sampling: SamplingSettings,
    processes: ProcessGroup = ProcessGroup(),  # noqa: B008
    max_missing: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """`heldout_<reward>`: each reward's mean over the first `count` test prompts with noise that training never sees; collective.

    max_missing: for each reward, the share of scores that may be missing (none if it is left out); the mean is over the others.

    If batches cannot be shared evenly, the last one is made more than once, because sharded weights need all processes in every
    call.
    """
    batch = sampling.decode_batch
    last = -(-min(count, len(prompts)) // batch) - 1
    mine = [min(turn + processes.rank, last) for turn in range(0, last + 1, processes.size)]
    batches = generate_images(policy, prompts, count, even_sigmas(sampling.steps, sampling.shift), 0, batch, mine)
    scored = {number: score_table(rewards, part, images) for number, (part, images) in zip(mine, batches)}
    everyone = {number: table for of_process in processes.gather(scored) for number, table in of_process.items()}
    table = pd.concat([everyone[number] for number in range(last + 1)])
    for name in rewards:
        reasons = table.reason[table.reward == name].dropna()
        check_missing(name, len(reasons), min(count, len(prompts)), (max_missing or {}).get(name, 0.0), *reasons[:1])
    return {f"heldout_{name}": float(table.score[table.reward == name].mean()) for name in rewards}
