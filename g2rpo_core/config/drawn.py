"""Says how often the base model is drawn beside runs: once for each way in which these draw."""

from collections.abc import Iterable

from g2rpo_core.foundation.runs import name_bases
from g2rpo_core.sampling.settings import SamplingSettings


def bases_for(
    own: SamplingSettings, runs: Iterable[SamplingSettings]
) -> dict[str, SamplingSettings]:
    """Return the settings to draw the base with, by name: each run has a base drawn as it is.

    own: the profile's, which come first if a run has them, and stand alone if there is no run.
    Settings that differ in nothing of DRAWN count as one.
    """
    wanted = list(runs) or [own]
    wanted = [*([own] if own.drawn in [each.drawn for each in wanted] else []), *wanted]
    distinct: list[SamplingSettings] = []
    for each in wanted:
        if each.drawn not in [one.drawn for one in distinct]:
            distinct.append(each)
    return dict(zip(name_bases([each.drawn for each in distinct]), distinct))


def base_for(bases: dict[str, SamplingSettings], run: SamplingSettings) -> str:
    """Return which of `bases_for` a run is compared with."""
    return next(name for name, each in bases.items() if each.drawn == run.drawn)
