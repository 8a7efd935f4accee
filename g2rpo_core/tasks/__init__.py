"""Define synthetic tasks of captioned images that can be drawn, and checked against their captions exactly."""

from typing import Literal, get_args

# Here, where importing them loads no library
TaskName = Literal["shapes", "marks"]
TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)
SIZES: dict[TaskName, int] = {"shapes": 32, "marks": 64}  # sides of their images, in pixels
