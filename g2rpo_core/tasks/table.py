"""List all tasks, and find the one that a caption belongs to."""

from collections.abc import Sequence
from typing import Any

import torch

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.tasks import TASK_NAMES
from g2rpo_core.tasks.shapes import Shapes
from g2rpo_core.tasks.task import Task
from g2rpo_core.tasks.words import Words

TASKS: dict[str, Task[Any]] = dict(zip(TASK_NAMES, (Shapes(), Words()), strict=True))


class NotACaption(UserError, ValueError):
    """A prompt that the exact check cannot score: it is no caption of a task."""


def find_task(caption: str) -> Task[Any]:
    """Return the task of a caption; NotACaption if it belongs to none."""
    for task in TASKS.values():
        try:
            task.parse(caption)
        except ValueError:
            continue
        return task
    raise NotACaption(f"not a caption of the tasks {', '.join(TASKS)}: {caption!r}")


def problem_of_prompt(prompt: str) -> str | None:
    """Say why the exact check cannot score images of a prompt; None if it can."""
    try:
        find_task(prompt)
    except NotACaption:
        return f"the exact check only knows captions of the tasks {', '.join(TASKS)}"
    return None


def verify(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """Return the share [N] float32 of asked attributes that each image [N, 3, H, W] holds.

    Images are in [0, 1]. The first caption decides the task. ValueError for other texts, and for
    images of another size than the task's.
    """
    return find_task(prompts[0]).verify(images, prompts)
