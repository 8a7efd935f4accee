"""The names of all worlds, for whoever need not wait for libraries."""

from typing import Literal, get_args

WorldName = Literal["shapes", "marks"]
WORLD_NAMES: tuple[WorldName, ...] = get_args(WorldName)
