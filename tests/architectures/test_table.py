"""Which base model a repository or a folder is of, and what it lacks to be one."""

import json
import shutil

from g2rpo_core.architectures.table import (
    known_repos,
    known_shape,
    read_architecture,
    text_encoders,
)
from g2rpo_core.config import load_profile
from g2rpo_core.estimate.tracing import shape_of
from g2rpo_core.hub.settings import HubModel
from tests.conftest import ROOT
from tests.fixtures.errors import refused


def test_every_published_repository_has_one_base():
    assert len(known_repos()) == len(set(known_repos())) >= 5
    for repo in known_repos():
        base, shape = known_shape(repo)
        assert shape is base.published[repo] and set(shape.encoders) == set(base.text_encoders)


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


def test_a_pipeline_that_is_none_of_them_or_lacks_an_encoder_is_refused(sd3_models, tmp_path):
    shutil.copytree(sd3_models / "pipeline", tmp_path / "pipeline")
    file = tmp_path / "pipeline" / "model_index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps(index | {"text_encoder_3": [None, None]}))
    with refused("has no text_encoder_3: Stable Diffusion 3 encodes .* all of text_encoder, "):
        text_encoders(tmp_path / "pipeline")
    file.write_text(json.dumps(index | {"_class_name": "SanaPipeline"}))
    with refused("SanaPipeline is no base model that is known here, only .*, StableDiffusion3"):
        read_architecture(tmp_path / "pipeline")
