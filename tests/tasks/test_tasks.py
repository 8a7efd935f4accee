import numpy as np
import pytest
import torch

from g2rpo_core.tasks.table import TASKS, find_task, verify
from g2rpo_core.tasks.task import Task, held_out
from g2rpo_core.tiny_models.clip import degrade
from g2rpo_core.tiny_models.tokenizers import CLIP_LENGTH, T5_LENGTH, clip_tokenizer, t5_tokenizer


@pytest.fixture(scope="module", params=TASKS)
def task(request) -> Task:
    return TASKS[request.param]


@pytest.fixture(scope="module")
def drawn(task):
    """600 scenes and their images."""
    scenes, images = task.sample(600, 7, testing=False)
    return scenes, torch.from_numpy(images)


def test_captions_say_everything_about_a_scene(task):
    rng = np.random.default_rng(0)
    for _ in range(2000):
        scene = task.random_scene(rng)
        assert task.parse(scene.caption) == scene
        assert find_task(scene.caption) is task
        assert scene.style in task.styles
        assert all(
            word in scene.caption and word in task.kinds[kind]
            for word, kind in task.elements(scene)
        )
    assert task.parse(task.example).caption == task.example


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a cat",
        "a large red circle",
        'the word "C A T"',
        'the word "CAT" in red',
        'the word "c a t" in red',
        'the word "C A T S" in red',
    ],
)
def test_other_texts_are_no_captions(text):
    for task in TASKS.values():
        with pytest.raises(ValueError, match="not a caption"):
            task.parse(text)
    with pytest.raises(ValueError, match="not a caption of the tasks"):
        verify(torch.rand(1, 3, 32, 32), [text])


def test_captions_fit_the_tokenizers_of_tiny_models(task):
    scenes = [task.all_scenes(style) for style in task.styles]
    captions = [scene.caption for each in scenes for scene in each[::29]]
    tokens = t5_tokenizer(task)(captions).input_ids
    assert max(map(len, tokens)) <= T5_LENGTH and not any(
        t5_tokenizer(task).unk_token_id in ids for ids in tokens
    )
    assert max(map(len, clip_tokenizer()(captions).input_ids)) <= CLIP_LENGTH


def test_held_out_captions_are_a_quarter_and_never_sampled_for_training(task):
    rng = np.random.default_rng(0)
    share = np.mean([held_out(task.random_scene(rng).caption) for _ in range(4000)])
    assert 0.2 < share < 0.3
    assert not any(held_out(scene.caption) for scene in task.sample(300, 0, testing=False)[0])
    assert all(held_out(scene.caption) for scene in task.distinct_scenes(300, 0, testing=True))


def test_distinct_scenes_are_distinct_and_spread_over_the_styles(task):
    scenes = task.distinct_scenes(200, 0, testing=False)
    assert len({scene.caption for scene in scenes}) == 200
    assert {scene.style for scene in scenes} == set(task.styles)
    first = {scene.caption for scene in scenes[:50]}
    assert not first & {
        scene.caption for scene in task.distinct_scenes(200, 0, testing=False, without=first)
    }


def test_right_images_hold_every_attribute(task, drawn):
    scenes, images = drawn
    assert verify(images, [scene.caption for scene in scenes]).tolist() == [1.0] * len(scenes)
    bare = torch.from_numpy(np.stack([task.draw(scene) for scene in scenes]))
    assert verify(bare, [scene.caption for scene in scenes]).tolist() == [1.0] * len(scenes)


def test_one_wrong_attribute_is_always_seen(task, drawn):
    """A neighbour's image never holds everything, and holds what they share."""
    scenes, _ = drawn
    rng = np.random.default_rng(0)
    others = [task.neighbour(scene, rng) for scene in scenes]
    images = torch.from_numpy(np.stack([task.draw(other, rng) for other in others]))
    scores = verify(images, [scene.caption for scene in scenes])
    assert (scores < 1).all()
    assert scores.mean() > 0.5


SHAPES = "a large red circle at the left"
WORDS = 'the word "C A T" in red'


@pytest.mark.parametrize(
    "asked, shown, wrong",
    [
        (SHAPES, "a small red circle at the left", {"size0"}),
        (SHAPES, "a large red cross at the left", {"shape0"}),
        (SHAPES, "a large red circle at the right", {"layout"}),
        (
            SHAPES,
            "a large blue circle at the left",
            {"shape0", "layout", "size0", "clean", "color0"},
        ),
        (WORDS, 'the word "B A T" in red', {"first letter"}),
        (WORDS, 'the word "C O T" in red', {"second letter"}),
        (WORDS, 'the word "C A I" in red', {"third letter"}),
        (WORDS, 'the word "C A T" in purple', {"color"}),
        (WORDS, 'the word "A C T" in red', {"first letter", "second letter"}),
    ],
)
def test_each_attribute_is_checked_by_itself(asked, shown, wrong):
    task = find_task(asked)
    image = torch.from_numpy(task.draw(task.parse(shown), np.random.default_rng(0)))[None]
    (held,) = task.attributes(image, [task.parse(asked)])
    assert {name for name, value in held.items() if not value} == wrong


def test_tricks_do_not_pass(task, drawn):
    """Flooding with the asked colour, speckles of it, an empty or a random image."""
    captions = [
        scene.caption
        for scene in drawn[0]
        if "red" in scene.caption and scene.style != "two objects"
    ]
    size = task.size
    red = torch.tensor(task.colors["red"]).view(3, 1, 1) / 255
    background = torch.full((3, size, size), 236 / 255)
    speckles = torch.where(
        torch.rand(1, size, size, generator=torch.Generator().manual_seed(0)) < 0.1, red, background
    )
    noise = torch.rand(3, size, size, generator=torch.Generator().manual_seed(0))
    for trick in (red.expand(3, size, size), speckles, background, noise):
        assert verify(trick.expand(len(captions), 3, size, size), captions).max() <= 0.44


def test_degrading_is_visible(task, drawn):
    _, images = drawn
    generator = torch.Generator().manual_seed(1)
    spoilt = degrade(task, images, images.roll(1, 0), 1.0, generator)
    assert spoilt.min() >= 0 and spoilt.max() <= 1
    assert ((spoilt - images).abs().amax((1, 2, 3)) > 0.05).float().mean() > 0.9
