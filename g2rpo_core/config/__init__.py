"""Loads resolved profiles: `load_profile`, `load_run`, `load_study`. Defines no setting."""

from g2rpo_core.config.load import (
    MainRun,
    Resolved,
    Run,
    Study,
    load_profile,
    load_run,
    load_study,
    profile_path,
    resolve,
    section_of,
    study_path,
)
from g2rpo_core.config.profile import MethodRun, Profile, method_of, sampling_of, training_of

__all__ = [
    "MainRun",
    "MethodRun",
    "Profile",
    "Resolved",
    "Run",
    "Study",
    "load_profile",
    "load_run",
    "load_study",
    "method_of",
    "profile_path",
    "resolve",
    "sampling_of",
    "section_of",
    "study_path",
    "training_of",
]
