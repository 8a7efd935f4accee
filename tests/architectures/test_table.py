"""Architectures are values: only their own files know their classes."""

import re

from g2rpo_core.architectures.table import ARCHITECTURES, known_repos, known_shape
from g2rpo_core.config import load_profile
from g2rpo_core.estimate.tracing import shape_of
from g2rpo_core.hub.settings import HubModel
from tests.conftest import ROOT
from tests.fixtures.errors import refused

OWN = ("g2rpo_core/architectures/", "g2rpo_core/tiny_models/")
CLASSES = re.compile(
    "|".join(
        kind.__name__
        for base in ARCHITECTURES.values()
        for kind in (base.pipeline, base.transformer, base.vae)
    )
)
MODULES = re.compile("|".join({type(base).__module__ for base in ARCHITECTURES.values()}))


def test_every_published_repository_has_one_base():
    assert len(known_repos()) == len(set(known_repos())) >= 5
    for repo in known_repos():
        base, shape = known_shape(repo)
        assert shape is base.published[repo] and set(shape.encoders) == set(base.text_encoders)
        assert any(repo.startswith(start) for start in base.licences)


def test_the_shape_of_an_unknown_repository_is_that_of_the_model_it_names():
    profile = load_profile(ROOT / "profiles" / "flux_hps_clip.yaml")

    def with_pipeline(**changes):
        model = HubModel(repo="somebody/flux-finetune", files=("*",), **changes)
        models = profile.models.model_copy(
            update={"repos": {**profile.models.repos, "pipeline": model}}
        )
        return profile.model_copy(update={"models": models})

    named = with_pipeline(architecture="black-forest-labs/FLUX.1-schnell")
    assert shape_of(named)[1].transformer["guidance_embeds"] is False
    with refused("somebody/flux-finetune is not known before its .*: name .*, one of black-forest"):
        shape_of(with_pipeline())
    with refused("builds its own small models"):
        shape_of(load_profile(ROOT / "profiles" / "tiny_sd3.yaml"))
