"""Profiles of published weights have the published settings, or a reason for each difference."""

import pytest

from g2rpo_core.config import load_profile
from tests.conftest import ROOT
from tools.reference import PUBLISHED, resolved_settings, rows_of

HUB = sorted(
    path.stem
    for path in (ROOT / "profiles").glob("*.yaml")
    if load_profile(path).models.source == "hub"
)


def differing(name: str):
    """(row, setting) of everything in which the profile is not as published."""
    profile = load_profile(ROOT / "profiles" / f"{name}.yaml")
    for entry in profile.methods:
        for row in rows_of(profile, entry):
            for setting, published in row["published"].items():
                if resolved_settings(profile, entry)(setting) != published:
                    yield entry, row, setting, published


@pytest.mark.parametrize("name", HUB)
def test_every_setting_is_the_published_one_or_has_a_reason(name):
    for entry, row, setting, published in differing(name):
        assert setting in row["differs"], (
            f"{name}, {entry}: {setting} is not {published}, as {row['source'] or row['instead']} "
            "has it"
        )


@pytest.mark.parametrize("name", HUB)
def test_every_entry_has_a_row(name):
    profile = load_profile(ROOT / "profiles" / f"{name}.yaml")
    assert [entry for entry in profile.methods if not rows_of(profile, entry)] == []


def test_every_reason_is_needed_and_said():
    needed = {(id(row), setting) for name in HUB for _, row, setting, _ in differing(name)}
    stale = [
        (row["methods"], setting)
        for row in PUBLISHED["rows"]
        for setting in row["differs"]
        if (id(row), setting) not in needed
    ]
    assert stale == []
    texts = [reason for row in PUBLISHED["rows"] for reason in row["differs"].values()]
    assert all(len(PUBLISHED["reasons"].get(reason, reason)) > 20 for reason in texts)
    assert set(PUBLISHED["reasons"]) <= set(texts)
    assert all(row["source"] or row["instead"] for row in PUBLISHED["rows"])
