"""The names of runs, in paths and in DVC's stages."""

BASE = ("base", 0)  # the entry and seed that stand for the untrained model


def run_name(method: str, seed: int | str) -> str:
    """The name of one training run, or of its evaluation."""
    return f"{method}-{seed}"
