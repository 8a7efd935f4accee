"""Check values of options that several commands share."""

from pathlib import Path

from g2rpo_core.config import Profile, load_profile, load_run, load_study, profile_path
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.inference.reward_models import PUBLISHED, Place
from g2rpo_core.numerics.portable import use
from g2rpo_core.rewards.spec import Section


def read_profile(name: str | None, study: str | None = None) -> tuple[str, Profile]:
    """Read a profile by its name, a study with changes to it, or params.yaml; return its name, too.

    Compute by its numerics from now on. UserError if both a profile and a study are given.
    """
    if name and study:
        raise UserError(
            f"--profile {name}, --study {study}: a study names its profile: give one of the two"
        )
    changes = load_study(study) if study else None
    name = changes.profile if changes else name or load_run().profile
    profile = load_profile(profile_path(name), changes)
    use(profile.numerics)
    return name, profile


def read_rewards(
    profile: str | None, models: Path | None, published: bool
) -> tuple[Section, Place]:
    """Return the section `rewards`, and where models are, for --profile, --models and --published.

    UserError if --published is given with --models, or with a profile that builds its models.
    """
    if published and models is not None:
        raise UserError(
            f"--published, --models {models}: each names the weights: give one of the two"
        )
    if models is not None and profile is None:
        return {}, models
    name, settings = read_profile(profile or (PUBLISHED if published else None))
    if not published:
        return settings.rewards, models or Path("models", name)
    if settings.models.source != "hub":
        raise UserError(
            f"--published, --profile {name}: that profile builds its models: omit --profile, "
            f"or give one with published models, such as {PUBLISHED}"
        )
    return settings.rewards, settings.models.repos
