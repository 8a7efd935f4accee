"""What a report says: tables of means and paired differences, computed from tidy results."""

from dataclasses import dataclass

import pandas as pd

from .statistics import Difference, paired_difference

BASE = "base"
METHOD_LABELS = {BASE: "base model", "g2rpo": "G²RPO", "g2rpo_no_mgai": "G²RPO w/o MGAI", "dance_grpo": "DanceGRPO"}


@dataclass(frozen=True)
class Cell:
    """One reward of one run: its mean over prompts, how many scores are missing, and the paired difference to the base."""

    mean: float
    missing: int
    difference: Difference | None


@dataclass(frozen=True)
class Row:
    method: str
    seed: int
    cells: dict[str, Cell]

    @property
    def label(self) -> str:
        return METHOD_LABELS[self.method]


def by_prompt(results: pd.DataFrame, method: str, seed: int, reward: str) -> pd.Series:
    """Scores of one run and reward, by prompt_id in a fixed order."""
    chosen = results[(results.method == method) & (results.seed == seed) & (results.reward == reward)]
    return chosen.set_index("prompt_id").score.sort_index()


def main_table(results: pd.DataFrame, rewards: list[str]) -> list[Row]:
    """The paper's Table 1: the base and every run against every reward, differences to the base paired by prompt.

    results: columns method, seed, prompt_id, reward, score, as `stages.evaluate` writes them.
    """
    rows = []
    for method, seed in results[["method", "seed"]].drop_duplicates().itertuples(index=False):
        cells = {}
        for reward in rewards:
            scores = by_prompt(results, method, seed, reward)
            difference = None
            if method != BASE:
                base = by_prompt(results, BASE, 0, reward).reindex(scores.index)
                difference = paired_difference(scores.to_numpy(), base.to_numpy(), f"{method}/{seed}/{reward}")
            cells[reward] = Cell(float(scores.mean()), int(scores.isna().sum()), difference)
        rows.append(Row(method, int(seed), cells))
    return sorted(rows, key=lambda row: (row.method != BASE,))


def trained_reward_difference(results: pd.DataFrame, method: str, seed: int, weights: dict[str, float]) -> Difference:
    """The run's weighted sum of training rewards against the base's, paired by prompt: what the training maximized."""
    total = lambda method, seed: sum(weight * by_prompt(results, method, seed, name) for name, weight in weights.items())
    treated = total(method, seed)
    return paired_difference(treated.to_numpy(), total(BASE, 0).reindex(treated.index).to_numpy(), f"{method}/{seed}/trained")


def between_methods(results: pd.DataFrame, first: str, second: str, seed: int, reward: str) -> Difference:
    """first - second with the same seed, paired by prompt."""
    scores = by_prompt(results, first, seed, reward)
    other = by_prompt(results, second, seed, reward).reindex(scores.index)
    return paired_difference(scores.to_numpy(), other.to_numpy(), f"{first}/{second}/{seed}/{reward}")
