"""Scores by the packages that people cite."""

import shutil

import pytest
import torch
from torchvision.transforms.v2 import functional as TF

from g2rpo_core.rewards import packages
from g2rpo_core.rewards import registry as rewards
from g2rpo_core.rewards.image_reward import image_reward
from tests.fixtures.errors import refused
from tests.fixtures.images import IMAGES, PROMPTS, SEEN, photograph

BACKENDS = {"hps": "hpsv2", "image_reward": "image-reward"}
CPU = torch.device("cpu")
SECTION = {name: {"backend": backend} for name, backend in BACKENDS.items()}


@pytest.mark.pipeline
@pytest.mark.parametrize("name", BACKENDS)
def test_the_package_and_our_own_code_give_one_score(models, name):
    """Also of a prompt that is cut, and of an image whose longer side is the model's."""
    native = rewards.load([name], models)[name]
    package = rewards.load([name], models, section=SECTION)[name]
    files = [*IMAGES.values(), photograph(32, 19), photograph(13, 32)]
    group = [PROMPTS[0]] * 3 + PROMPTS[1:6]  # the images of a prompt come together
    for prompts in ([*PROMPTS, *PROMPTS[:2]], [*group, *[" ".join(PROMPTS)] * 2]):
        theirs = package(files, prompts)
        assert theirs.shape == (10,) and theirs.dtype == torch.float32 and theirs.std() > 1e-4
        torch.testing.assert_close(theirs, native(files, prompts), rtol=0, atol=1e-5)


@pytest.mark.pipeline
@pytest.mark.parametrize("name", BACKENDS)
def test_a_package_gets_tensors_as_files_of_8_bits(models, name):
    package = rewards.load([name], models, section=SECTION)[name]
    files = [photograph(32, 32, seed) for seed in range(4)]
    exact = torch.stack(
        [TF.to_dtype(TF.pil_to_tensor(file), torch.float32, scale=True) for file in files]
    )
    between = (exact + 0.4 / 255).clamp(0, 1)  # what a decoder makes is no multiple of 1/255
    assert torch.equal(package(between, PROMPTS[:4]), package(files, PROMPTS[:4]))


def test_a_package_in_bfloat16_is_refused():
    with pytest.raises(
        ValueError,
        match="rewards.hps.backend: hpsv2 computes only in float32; leave out dtype: bfloat16",
    ):
        rewards.settings_of({"hps": {"backend": "hpsv2", "dtype": "bfloat16"}}, "hps")


def test_a_package_that_is_not_there_or_another_says_what_to_install():
    for package, version in (("hpsv2", "1.2.0"), ("not-to-be-found", "none")):
        with refused(f"installed is {version}: pip install --no-deps {package}==9.9$"):
            packages.check_installed(package, "9.9", "rewards.hps.backend")


@pytest.mark.pipeline
def test_image_reward_equals_image_reward(models, tmp_path):
    """With weights far from a start's, so that every layer matters."""
    tokenizer = models / "image_reward_tokenizer"
    weights = torch.load(models / "image_reward" / "ImageReward.pt", weights_only=True)
    generator = torch.Generator().manual_seed(0)
    for key, value in weights.items():
        if value.is_floating_point():
            weights[key] = value + 0.1 * torch.randn(value.shape, generator=generator)
    torch.save(weights, tmp_path / "ImageReward.pt")
    shutil.copy(models / "image_reward" / "med_config.json", tmp_path)
    published = packages.image_reward(tmp_path, tokenizer, CPU)
    theirs = torch.tensor(
        [published(prompt, image) for image, prompt in zip(SEEN.values(), PROMPTS)]
    )
    ours = image_reward(tmp_path, tokenizer, CPU)
    torch.testing.assert_close(ours(list(IMAGES.values()), PROMPTS), theirs, rtol=1e-5, atol=1e-5)
    assert theirs.std() > 0.1
