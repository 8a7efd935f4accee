"""The reward for text in images: the recognizer itself, and Flow-GRPO's rule."""

import math
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torchvision.transforms.v2 import functional as TF

from g2rpo_core.rewards import ocr, registry
from g2rpo_core.rewards.scoring import note_cut, score_one
from g2rpo_core.tasks.table import TASKS
from tests.fixtures.errors import refused

SIGN = 'a sign that says "Hello World", in the rain'


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    return registry.load(["ocr"], tmp_path_factory.mktemp("no_models"))["ocr"]


def drawn(text: str, size: int = 36, background: str | Image.Image = "white") -> Image.Image:
    """An image of 256 x 256 pixels with a text in PIL's own font."""
    image = Image.new("RGB", (256, 256), background) if isinstance(background, str) else background
    ImageDraw.Draw(image).text((20, 90), text, fill="black", font=ImageFont.load_default(size))
    return image


def tensor(image: Image.Image) -> torch.Tensor:
    return TF.to_dtype(TF.pil_to_tensor(image), torch.float32, scale=True)


@pytest.mark.parametrize(
    "prompt, text",
    [
        (SIGN, "helloworld"),
        ("a mug with “Good  Morning” on it", "goodmorning"),
        ('“Open”, then "Closed"', "open"),
        ('an "open quote', None),
        ("ein Schild »Bitte klingeln«, daneben «Nein»", "bitteklingeln"),
        ("znak „Wyjście”", "wyjście"),
        ("看板「営業中」", "営業中"),
        ("a mug that says ‘Don’t panic’", "don'tpanic"),
        ("it’s a dog’s bowl, no text", None),
    ],
)
def test_the_first_text_in_double_quotes_is_asked_for(prompt, text):
    if text is None:
        assert ocr.problem_of_prompt(prompt) == "the prompt has no text in double quotes"
    else:
        assert ocr.text_asked(prompt) == text and ocr.problem_of_prompt(prompt) is None


@pytest.mark.parametrize(
    "read, asked, score",
    [
        ("open", "open", 1.0),
        ("weareopentoday", "open", 1.0),  # part of what is read
        ("opel", "open", 0.75),
        ("daily from nine to five", "open", 0.0),  # the distance is cut at the length
        ("wait..", "wait...", 1 - 1 / 7),
        # As the reader writes them
        ("Joe's", "Joe’s", 1.0),
        ("20℃", "20°C", 1.0),
        ("Wait..", "Wait…", 1.0),
        ("a-b", "a—b", 1.0),
        ("fine", "ﬁne", 1.0),
    ],
)
def test_the_score_is_the_distance_over_the_length_of_the_text(read, asked, score):
    assert ocr.similarity(ocr.written(read), ocr.text_asked(f'"{asked}"')) == score


def test_noise_is_no_text_that_is_read_with_confidence(tmp_path):
    """Without detection, as with it: this noise is read as 和, at a confidence of 0.08."""
    noise = np.random.default_rng(0).random((512, 512, 3), np.float64).transpose(2, 0, 1)[None]
    for least, score in ((0.05, 1), (0.5, 0)):
        settings = {"ocr": {"detect": False, "min_confidence": least}}
        reward = registry.load(["ocr"], tmp_path, section=settings)["ocr"]
        assert reward(torch.from_numpy(noise).float(), ['a sign that says "和"']).item() == score


def test_letters_that_cannot_be_read_are_named_with_their_prompts(reward, capsys):
    note_cut({"ocr": reward}, [SIGN, 'a "Привет"', "a sign „¡Hola!“", "no text"])
    assert "ocr cannot read ¡ в е и п р т: 2 of 4 prompts" in capsys.readouterr().err
    note_cut({"ocr": reward}, [SIGN, "a cup that says “Joe’s Café, 20 °C…”"])
    assert not capsys.readouterr().err


def test_the_words_of_the_task_are_read_as_one_line_each(tmp_path):
    """All but one in a hundred, without looking for lines first."""
    scenes, images = TASKS["words"].sample(100, 3, testing=True)
    settings = {"ocr": {"detect": False}}
    reward = registry.load(["ocr"], tmp_path, section=settings)["ocr"]
    prompts = [scene.caption for scene in scenes]
    scores = reward(torch.from_numpy(images), prompts)
    assert (scores == 1).float().mean() >= 0.99
    # The words of other images
    assert reward(torch.from_numpy(images), prompts[1:] + prompts[:1]).mean() < 0.5


def test_an_image_scored_alone_equals_the_batch_and_tensors_equal_files(reward):
    images = [drawn(text) for text in ("Hello World", "Hello", "Hallo Welt", "World")]
    together = reward(images, [SIGN] * 4)
    assert together.dtype == torch.float32 and together.std() > 0
    assert together.tolist() == [reward([image], [SIGN]).item() for image in images]
    assert together.equal(reward(torch.stack([tensor(image) for image in images]), [SIGN] * 4))
    # Of tensors only what files hold counts
    assert together.equal(
        reward(torch.stack([tensor(image) for image in images]) + 0.4 / 255, [SIGN] * 4)
    )


def test_a_score_says_what_was_read_and_a_missing_one_why(reward):
    scores, reasons = score_one(reward, [drawn("Hello World")] * 2, [SIGN, "a sign"])
    assert scores[0] == 1.0 and math.isnan(scores[1].item())
    assert reasons == ["read 'Hello World'", "the prompt has no text in double quotes"]


def test_without_the_extra_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with refused(r"^rewards.ocr needs rapidocr: pip install 'g2rpo\[ocr\]'$"):
        registry.check("ocr", {})
