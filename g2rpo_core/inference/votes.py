"""Keep votes with their images, and count them: who beats whom, which rewards agree with people."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from g2rpo_core.foundation.claims import one_at_a_time
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import sync, write_whole
from g2rpo_core.rewards.preprocess import eight_bit
from g2rpo_core.rewards.registry import REWARDS
from g2rpo_core.rewards.scoring import score_one
from g2rpo_core.rewards.spec import Reward
from g2rpo_core.rewards.votes import EQUAL, SCHEMA, SIDES, decided, lock_of, read_images, read_votes

VOTES = Path("votes")  # a Parquet file per profile, with a folder of its images beside it
CONFIDENCE = 0.95
MOST_VOTES = 10_000  # in a file; a few hundred fit a reward


def file_of(profile: str) -> Path:
    """Return the file with the votes on images of a profile."""
    return VOTES / f"{profile}.parquet"


def add_vote(file: Path, vote: Mapping[str, object], images: Mapping[str, bytes]) -> None:
    """Append one vote to the file, and write its images beside it, each as a PNG named by its hash.

    vote: prompt, winner, voter, run and seed of each side, and the id of its pair; images: side ->
    the PNG file. When this returns, all is on disk; a process that ends before leaves the earlier
    votes as they were. Of several writers, one waits for the other. UserError for a second vote on
    a pair, and for more than MOST_VOTES.

    Each vote writes the whole file again, so that it is one Parquet file at any time. With
    MOST_VOTES in it that took 0.8 s on one of two shared cores.
    """
    folder = file.with_suffix("")
    row = {"time": datetime.now(UTC), "pair": "", **vote}
    with one_at_a_time(lock_of(file)):
        earlier = read_votes(file) if file.exists() else None
        if earlier is not None and len(earlier) >= MOST_VOTES:
            raise UserError(f"{file}: holds {MOST_VOTES} votes: begin another file")
        if earlier is not None and row["pair"] and (earlier.pair == row["pair"]).any():
            raise UserError("this pair has its vote already: draw another one")
        folder.mkdir(exist_ok=True)
        for side in SIDES:
            digest = hashlib.sha256(images[side]).hexdigest()
            path = folder / f"{digest[:16]}.png"
            if not path.exists():
                write_whole(path, images[side])
            row |= {
                f"{side}_file": path.relative_to(file.parent).as_posix(),
                f"{side}_sha256": digest,
            }
        sync(folder)
        tables = [pa.Table.from_pylist([row], schema=SCHEMA)]
        if earlier is not None:
            tables.insert(0, pa.Table.from_pandas(earlier, schema=SCHEMA, preserve_index=False))
        write_whole(file, pa.concat_tables(tables).to_pandas().to_parquet(index=False))
        sync(file.parent)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Return a share's 95 % interval: Wilson's (1927), uncorrected; all of [0, 1] for count 0."""
    if not count:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = (successes + z * z / 2) / (count + z * z)
    half = z / (count + z * z) * math.sqrt(successes * (count - successes) / count + z * z / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def share(successes: int, count: int) -> str:
    """Describe a share with its interval, as `6 of 8, 75.0 % (40.9 % to 92.9 %)`."""
    if not count:
        return "0 of 0"
    low, high = wilson(successes, count)
    return f"{successes} of {count}, {successes / count:.1%} ({low:.1%} to {high:.1%})".replace(
        "%", " %"
    )


def win_rates(table: pd.DataFrame) -> list[str]:
    """Describe, for each pair of runs, how often one beat the other, a line each.

    Votes on two images of one run are left out.
    """
    lines = []
    for one, other in combinations(sorted({*table.left_run, *table.right_run}), 2):
        either = table[
            ((table.left_run == one) & (table.right_run == other))
            | ((table.left_run == other) & (table.right_run == one))
        ]
        if len(either):
            votes = decided(either)
            wins = int((votes.left_run.where(votes.winner == "left", votes.right_run) == one).sum())
            equal = f", and {len(either) - len(votes)} equal" if len(votes) < len(either) else ""
            lines.append(f"{one} beats {other} in {share(wins, len(votes))}{equal}")
    return lines


def agreement(name: str, reward: Reward, file: Path, table: pd.DataFrame) -> str:
    """Describe how often a reward scores the winner higher.

    Votes with equal or missing scores are left out, and counted.
    """
    votes, batch, scores = decided(table), 64, []
    for start in range(0, len(votes), batch):
        part = votes.iloc[start : start + batch]
        scores.append(np.stack([_scores(name, reward, file, part, side) for side in SIDES]))
    left, right = np.concatenate(scores, 1) if scores else np.empty((2, 0))
    missing, equal = int((np.isnan(left) | np.isnan(right)).sum()), int((left == right).sum())
    agrees = int(np.where(votes.winner == "left", left > right, left < right).sum())
    left_out = [
        f"{count} with {what} scores"
        for count, what in ((equal, "equal"), (missing, "missing"))
        if count
    ]
    rest = f"; left out: {', '.join(left_out)}" if left_out else ""
    return f"{share(agrees, len(votes) - missing - equal)}{rest}"


def _scores(name: str, reward: Reward, file: Path, table: pd.DataFrame, side: str) -> np.ndarray:
    """Score the left or right images, [N], NaN where a score is missing."""
    images, prompts = read_images(file, table, side), list(table.prompt)
    if name in REWARDS and REWARDS[name].tasks_only:
        return np.array(
            [
                _exact_score(reward, image, prompt)
                for image, prompt in zip(eight_bit(images), prompts)
            ]
        )
    return score_one(reward, images, prompts)[0].double().cpu().numpy()


def _exact_score(reward: Reward, image: torch.Tensor, prompt: str) -> float:
    try:
        return float(reward(image[None] / 255, [prompt]))
    except ValueError:  # no caption of a tiny task, or no image of its size
        return math.nan


def about(file: Path, table: pd.DataFrame) -> str:
    """Describe the votes in a line. The order was drawn, so that the left image should win half."""
    voters: Sequence[str] = [voter for voter in table.voter.unique() if voter]
    named = f" by {', '.join(sorted(voters))}" if voters else ""
    left, equal = int((table.winner == "left").sum()), int((table.winner == EQUAL).sum())
    return (
        f"{file}: {len(table)} votes{named} on {table.prompt.nunique()} prompts; {equal} equal; "
        f"the left image won {share(left, len(table) - equal)}"
    )
