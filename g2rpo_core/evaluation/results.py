"""The outputs of an evaluation: the columns of its tables, the folders of its images, and the rows that reports use."""

import pandas as pd

from g2rpo_core.evaluation.settings import EvaluationSettings

SCORES = ["method", "seed", "checkpoint", "steps", "prompt_id", "style", "reward", "score", "reason"]


def image_folder(checkpoint: str | int, steps: int) -> str:
    """The folder, within an evaluation's, with the images of a checkpoint sampled in this number of steps."""
    return f"pictures/{checkpoint}-{steps}"


def chosen(results: pd.DataFrame, checkpoint: str | int, steps: int) -> pd.DataFrame:
    """The rows of a checkpoint and number of steps.

    A model without that checkpoint, such as the base, keeps the rows that it has.
    """
    rows = results[results.steps == steps]
    there = rows.checkpoint == str(checkpoint)
    return rows[there | ~rows.method.isin(rows.method[there])]


def reported(results: pd.DataFrame, settings: EvaluationSettings) -> pd.DataFrame:
    """The rows that reports use: the first checkpoint and the first number of steps."""
    return chosen(results, settings.checkpoints[0], settings.steps[0])
