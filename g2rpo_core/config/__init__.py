"""Loads resolved profiles: `load_profile`, `load_run`, `load_study`. Defines no setting."""

from g2rpo_core.config.load import (
    COSTS,
    MainRun,
    Resolved,
    Run,
    Study,
    evaluated_together,
    load_profile,
    load_run,
    load_study,
    profile_path,
    resolve,
    section_of,
    study_path,
)
from g2rpo_core.config.profile import MethodRun, Profile, ResolvedRun

__all__ = [
    "COSTS",
    "MainRun",
    "MethodRun",
    "Profile",
    "Resolved",
    "ResolvedRun",
    "Run",
    "Study",
    "evaluated_together",
    "load_profile",
    "load_run",
    "load_study",
    "profile_path",
    "resolve",
    "section_of",
    "study_path",
]
