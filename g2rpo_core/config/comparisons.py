"""Comparisons that a study names before its runs."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from g2rpo_core.foundation.settings import Name, Settings

TRAINING = "training"  # the training reward
FEWEST_EXACT = 6  # values with which an exact two-sided p can be below 5 %: 2 / 2^6


class Comparison(Settings):
    """Two entries of a study, which are expected to differ in one measure, or to be level in it.

    It holds if the whole interval of the difference, paired by seed or base, is above -margin, or
    within ± level (`over_seeds.preregistered`).
    """

    method: Name = Field(description="Entry that is expected to be above.")
    against: Name = Field(description="The other entry.")
    reward: Name = Field(
        TRAINING, description="One of evaluation.rewards, or `training`, the training reward."
    )
    margin: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="How far `method` may be below and still hold; 0: it must be above.",
    )
    level: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description=(
            "Expect instead that both are level: "
            "the interval of two one-sided tests is within ± this."
        ),
    )
    role: Literal["primary", "secondary", "other"] = Field(
        "other",
        description=(
            "`primary`: judged alone, at 5 %; `secondary`: likewise, if the primary holds; "
            "`other`: judged together with all others, by Holm beside a primary, else by joint "
            "intervals."
        ),
    )
    test: Literal["student", "exact"] = Field(
        "student",
        description=(
            "What judges it beside a primary one: Student's t, or the exact test by sign flips, "
            "which assumes no distribution and needs at least six bases, or seeds on one."
        ),
    )

    @model_validator(mode="after")
    def _one_question(self):
        if self.level and self.margin:
            raise ValueError("either margin (not below) or level (neither below nor above)")
        return self


def check_comparisons(comparisons: Sequence[Comparison], values: int) -> None:
    """Check that a study's comparisons can be judged together, over that many bases or seeds.

    ValueError if the roles do not fit, or the exact test cannot be significant.
    """
    roles = [one.role for one in comparisons]
    if (
        roles.count("primary") > 1
        or roles.count("secondary") > 1
        or ("secondary" in roles and "primary" not in roles)
    ):
        raise ValueError("comparisons: one may be primary, and beside it one secondary")
    exact = any(one.test == "exact" for one in comparisons)
    if exact and (values < FEWEST_EXACT or "primary" not in roles):
        raise ValueError(
            f"comparisons: test: exact needs at least {FEWEST_EXACT} bases, or seeds on one, "
            "as fewer cannot be significant, and one comparison with role: primary"
        )
