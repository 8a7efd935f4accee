"""PickScore against transformers used directly, as the published model card uses it."""

import torch

from g2rpo_core.rewards import registry as rewards
from reference import upstream_scorers as upstream
from tests.fixtures.images import IMAGES, PROMPTS


def test_equals_transformers_over_100(models):
    published = upstream.pickscore(models / "pickscore", models / "pickscore_processor", torch.device("cpu"))
    ours = rewards.load(["pickscore"], models)["pickscore"](list(IMAGES.values()), PROMPTS)
    theirs = torch.tensor([published(prompt, [image])[0] for image, prompt in zip(IMAGES.values(), PROMPTS)])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert theirs.std() > 1e-4


def test_a_text_over_the_models_length_is_cut(models):
    scorer = rewards.load(["pickscore"], models)["pickscore"]
    long = "a red circle " * 60
    assert scorer([IMAGES["square"]], [long]).isfinite().all()
