"""What an evaluation leaves: its tables' columns, where its images are, and which of it reports are about."""

import pandas as pd

from g2rpo_core.evaluation.settings import EvaluationSettings

SCORES = ["method", "seed", "checkpoint", "steps", "prompt_id", "style", "reward", "score", "reason"]


def image_folder(checkpoint: str | int, steps: int) -> str:
    """Where in the folder of an evaluation the images of a checkpoint are, by the number of steps they were sampled in."""
    return f"pictures/{checkpoint}-{steps}"


def chosen(results: pd.DataFrame, checkpoint: str | int, steps: int) -> pd.DataFrame:
    """The rows of a checkpoint and number of steps; a model without that checkpoint, as the base, stands beside each with what it has."""
    rows = results[results.steps == steps]
    there = rows.checkpoint == str(checkpoint)
    return rows[there | ~rows.method.isin(rows.method[there])]


def reported(results: pd.DataFrame, settings: EvaluationSettings) -> pd.DataFrame:
    """The rows that reports are about: the first of the checkpoints and of the numbers of steps."""
    return chosen(results, settings.checkpoints[0], settings.steps[0])
