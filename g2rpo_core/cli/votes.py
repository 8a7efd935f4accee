"""Print what people voted in the demo, and which rewards agree with them, for `g2rpo votes`."""

from functools import partial
from pathlib import Path

import pandas as pd
import torch

from g2rpo_core.cli.options import read_profile, resolve_alias
from g2rpo_core.foundation.errors import UserError, attempt
from g2rpo_core.foundation.files import existing
from g2rpo_core.foundation.manifest import sha256
from g2rpo_core.foundation.texts import echo
from g2rpo_core.hub.model_store import ModelStore
from g2rpo_core.inference.runs import tiny_rewards
from g2rpo_core.inference.votes import about, agreement, file_of, share, win_rates
from g2rpo_core.numerics.processes import device_of
from g2rpo_core.rewards.registry import compares, labels, load, refuse_comparing, settings_of
from g2rpo_core.rewards.similarity import clip_score
from g2rpo_core.rewards.spec import Section
from g2rpo_core.rewards.votes import VotesSettings, cross_validate, differences, enough, read_votes


def votes(profile: str | None, file: Path | None, reward: list[str] | None) -> None:
    """Check the options, then print; UserError before any model is loaded."""
    profile, settings = read_profile(profile)
    # Check the options
    named = labels(settings.rewards)
    usual = dict.fromkeys([*settings.training.rewards, *settings.evaluation.rewards])
    names = [resolve_alias(name) for name in reward or ()]
    for name in filter(compares, names):
        raise UserError(refuse_comparing(f"--reward {name}", name, settings.rewards))
    if "votes" in names:
        raise UserError(
            "--reward votes: was fitted to votes, so its agreement with them says nothing: omit it"
        )
    names = names or [name for name in usual if name != "votes" and not compares(name)]
    if unknown := [name for name in names if name not in named]:
        raise UserError(f"--reward {unknown[0]}: unknown; there are {', '.join(named)}")
    file, models = file or file_of(profile), Path("models", profile)
    table = read_votes(existing(file))
    echo(about(file, table))
    for line in win_rates(table):
        echo(line)
    # Rewards that exist, one after the other
    device = device_of(None)
    for name in names:
        scorer = load([name], models, device, settings.rewards)[name]
        echo(f"{named[name]} ({name}) agrees with {agreement(name, scorer, file, table)}")
    if note := tiny_rewards(names, models):
        echo(f"note: scores are from {note}")
    # The reward that could be fitted
    lines, problems = attempt(partial(describe_head, file, table, models, device, settings.rewards))
    for line in [
        *(lines or ()),
        *(f"no reward from these votes: {problem}" for problem in problems),
    ]:
        echo(line)


def describe_head(
    file: Path, table: pd.DataFrame, models: Path, device: torch.device, section: Section
) -> list[str]:
    """Describe how well a head predicts votes on unseen prompts, and how to use it.

    UserError if there are too few votes.
    """
    enough(file, table)
    settings = settings_of(
        {
            "votes": {
                key: value for key, value in section.get("votes", {}).items() if key != "server"
            }
        },
        "votes",
    )
    assert isinstance(settings, VotesSettings)
    scorer = clip_score(ModelStore(models).folder("clip_score"), device, settings)
    right, asked = cross_validate(differences(scorer, file, table), table, settings.l2)
    return [
        (
            f"a reward fitted to these votes predicts {share(right, asked)} on prompts that it has "
            "not seen; 50 % is chance"
        ),
        f"to use it: rewards: {{votes: {{file: {file}, sha256: {sha256(file)}}}}}",
    ]
