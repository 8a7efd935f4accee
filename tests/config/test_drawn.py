"""Sampling settings of an entry in training, monitor, evaluation and generation, per profile."""

import pytest

from g2rpo_core.config import load_profile
from g2rpo_core.config.drawn import base_for
from g2rpo_core.foundation.runs import drawn_of
from g2rpo_core.inference.runs import drawn_as
from g2rpo_core.reporting.measured import Compared
from g2rpo_core.sampling.settings import DRAWN, SamplingSettings
from tests.conftest import ROOT

PROFILES = ("tiny", "flux_hps_clip", "sd35_medium_hps_clip")  # guided in three ways
# What a later stage does not take over from an entry, and why
NOT_TAKEN_OVER = {
    "steps": (
        "evaluation.steps: many numbers of steps are compared, the same ones for the base and for "
        "every run"
    ),
    "shift": (
        "evaluation and generation take the scheduler's own sigmas, "
        "as whoever uses the weights does, for the base and for every run"
    ),
    "height": (
        "evaluation.height: published tables have the model's own size, "
        "and some trainings a smaller one"
    ),
    "width": "as height",
    "batch_tokens": "how much is computed at once: evaluation.batch",
    "decode_batch": "how much is computed at once: evaluation.batch",
}


def test_every_setting_is_taken_over_or_listed():
    assert {*DRAWN, *NOT_TAKEN_OVER} == set(SamplingSettings.model_fields)


@pytest.mark.parametrize("name", PROFILES)
def test_every_entry_is_drawn_alike_in_training_monitor_evaluation_and_generation(name):
    profile = load_profile(ROOT / "profiles" / f"{name}.yaml")
    drawn, entries = profile.drawn(), {entry: profile.run(entry) for entry in profile.methods}
    compared = Compared(name, profile, entries, [(entry, 1) for entry in entries])
    for entry, run in entries.items():
        training = {key: getattr(run.sampling, key) for key in DRAWN}
        assert drawn_of(entry, drawn) == {entry: training}
        shown = drawn_as(["base", f"{entry}-1"], name, profile)
        assert (
            shown[f"{entry}-1"][1].drawn == shown["base"][1].drawn == training and len(shown) == 2
        )
        # The base that its gain is over
        base = compared.bases_of[entry]
        assert drawn_of("base", drawn)[base] == training and base == base_for(
            compared.drawn, run.sampling
        )
