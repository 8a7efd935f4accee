"""Profiles of published weights have the published settings, or a reason for each difference."""

import pytest

from g2rpo_core.config import load_profile
from tests.conftest import ROOT
from tools.reference import resolved_settings, rows_of

HUB = sorted(
    path.stem
    for path in (ROOT / "profiles").glob("*.yaml")
    if load_profile(path).models.source == "hub"
)


@pytest.mark.parametrize("name", HUB)
def test_every_setting_is_the_published_one_or_has_a_reason(name):
    profile = load_profile(ROOT / "profiles" / f"{name}.yaml")
    for entry in profile.methods:
        rows = rows_of(profile, entry)
        assert rows, entry
        found = resolved_settings(profile, entry)
        for row in rows:
            differing = {
                name for name, published in row["published"].items() if found(name) != published
            }
            assert differing <= row["differs"].keys(), (entry, row["source"] or row["instead"])
