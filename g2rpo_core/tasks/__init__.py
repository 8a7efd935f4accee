"""Synthetic tasks: captioned images that are drawn, and checked exactly against their captions."""

from typing import Literal, get_args

# Here, where importing them loads no library
TaskName = Literal["shapes", "words"]
TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)
# Sides of their images, in pixels
SIZES: dict[TaskName, int] = {"shapes": 32, "words": 32}
