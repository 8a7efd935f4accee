"""The names of all worlds, for whoever need not wait for libraries."""

WORLD_NAMES = ("shapes", "marks")
