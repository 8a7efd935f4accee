import numpy as np
import pytest
import torch
from g2rpo_core.shapes.scenes import distinct_scenes, draw, held_out, parse_caption, random_scene, sample
from g2rpo_core.shapes.verifier import attributes, verify

from g2rpo_core.tiny_models.clip import degrade, neighbour


@pytest.fixture(scope="module")
def drawn():
    """600 scenes and their images."""
    scenes, images = sample(600, 7, testing=False)
    return scenes, torch.from_numpy(images)


def test_captions_say_everything_about_a_scene():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        scene = random_scene(rng)
        assert parse_caption(scene.caption) == scene


@pytest.mark.parametrize(
    "text", ["", "a cat", "a large red circle", "a large red circle at the left above", "two large red circles in the middle"]
)
def test_other_texts_are_no_captions(text):
    with pytest.raises(ValueError, match="not a caption"):
        parse_caption(text)


def test_the_generator_is_seeded():
    first, again, other = (sample(20, seed, testing=False) for seed in (1, 1, 2))
    assert first[0] == again[0] != other[0]
    assert np.array_equal(first[1], again[1])


def test_held_out_captions_are_a_quarter_and_never_sampled_for_training():
    rng = np.random.default_rng(0)
    share = np.mean([held_out(random_scene(rng).caption) for _ in range(4000)])
    assert 0.2 < share < 0.3
    assert not any(held_out(scene.caption) for scene in sample(300, 0, testing=False)[0])
    assert all(held_out(scene.caption) for scene in distinct_scenes(300, 0, testing=True))


def test_more_captions_than_the_task_has_are_refused():
    with pytest.raises(ValueError, match="no 100000 different"):
        distinct_scenes(100_000, 0, testing=True)


def test_right_images_hold_every_attribute(drawn):
    scenes, images = drawn
    assert verify(images, [scene.caption for scene in scenes]).tolist() == [1.0] * len(scenes)


def test_noise_that_the_eye_ignores_does_not_matter(drawn):
    scenes, images = drawn
    noisy = (images + 0.05 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    assert verify(noisy, [scene.caption for scene in scenes]).mean() > 0.999


def test_one_wrong_attribute_is_always_seen(drawn):
    """An image of a scene's neighbour never holds everything, and holds what they have in common."""
    scenes, _ = drawn
    rng = np.random.default_rng(0)
    others = [neighbour(scene, rng) for scene in scenes]
    images = torch.from_numpy(np.stack([draw(other, rng) for other in others]))
    scores = verify(images, [scene.caption for scene in scenes])
    assert (scores < 1).all()
    assert scores.mean() > 0.5


def test_each_attribute_is_checked_by_itself():
    rng = np.random.default_rng(0)
    caption = "a large red circle at the left"
    for other, wrong in [
        ("a small red circle at the left", {"size0"}),
        ("a large red cross at the left", {"shape0"}),
        ("a large red circle at the right", {"layout"}),
        ("a large blue circle at the left", {"color0", "shape0", "size0", "layout", "clean"}),
    ]:
        image = torch.from_numpy(draw(parse_caption(other), rng))[None]
        (held,) = attributes(image, [caption])
        assert {name for name, value in held.items() if not value} == wrong


def test_tricks_do_not_pass(drawn):
    """Flooding with the asked colour, speckles of it, an empty or a random image."""
    captions = [scene.caption for scene in drawn[0] if scene.style == "one object" and "red" in scene.caption]
    red = torch.tensor([214, 40, 40]).view(3, 1, 1) / 255
    background = torch.full((3, 32, 32), 236 / 255)
    speckles = torch.where(torch.rand(1, 32, 32, generator=torch.Generator().manual_seed(0)) < 0.1, red, background)
    noise = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    for trick in (red.expand(3, 32, 32), speckles, background, noise):
        assert verify(trick.expand(len(captions), 3, 32, 32), captions).max() <= 0.4 + 1e-6


def test_degrading_is_visible_and_seeded(drawn):
    _, images = drawn
    spoilt, again = (degrade(images, images.roll(1, 0), 1.0, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(spoilt, again)
    assert spoilt.min() >= 0 and spoilt.max() <= 1
    assert ((spoilt - images).abs().amax((1, 2, 3)) > 0.05).float().mean() > 0.95
