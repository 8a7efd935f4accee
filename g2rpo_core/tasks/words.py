"""Task `words`: a word of three capital letters in one of six colours, on 32 x 32 pixels.

Whether a word is right is seen by anybody, and read by OCR models that others trained on
photographs (reward `ocr`). The verifier finds the palette's colour that explains the image best,
and in each letter's cell, exhaustively, the glyph that covers its ink best.
"""

import dataclasses
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

from g2rpo_core.tasks import SIZES
from g2rpo_core.tasks.drawing import BACKGROUND, COLORS, SUPERSAMPLING, canvas, paint
from g2rpo_core.tasks.task import Task

SIZE = SIZES["words"]
LETTERS = string.ascii_uppercase
PLACES = ("first letter", "second letter", "third letter")
CELL = 10  # pixels: width of a letter's cell
LEFT = (SIZE - CELL * len(PLACES)) // 2  # of the first cell
FONT = 14  # pixels: size of Pillow's embedded font, whose capitals are 10 high then
STROKE = 0.3  # pixels, around each line: thin lines are lost on latents of 4 x 4 pixels
WIDEST = CELL - 1  # pixels: wider letters are squeezed
JITTER = 1  # pixels: a word is drawn up to so far from the middle

REACH = 2  # pixels: a letter is looked for up to so far from the middle of its cell
# Intersection over union of a cell's ink and the best glyph; below it, no letter is recognised
MIN_IOU = 0.6
INKED = (0.04, 0.5)  # share of the image: less is no word, more is flooded
MAX_STRAY = 0.08  # RMS distance of pixels to the line from the background to the word's colour


@dataclass(frozen=True)
class WordsScene:
    """A word and its colour."""

    word: str
    color: str

    @property
    def caption(self) -> str:
        """Return the caption; spaces make each letter a token of its own in every tokenizer."""
        return f'the word "{" ".join(self.word)}" in {self.color}'

    @property
    def style(self) -> str:
        return self.color


class Words(Task[WordsScene]):
    """The task of 105,456 captions: 17,576 words in six colours."""

    size, colors, styles = SIZE, COLORS, tuple(COLORS)
    kinds = {**dict.fromkeys(PLACES, LETTERS), "color": COLORS}
    other_words = ("the", "word", "in", '"')
    example = 'the word "C A T" in red'

    def random_scene(self, rng: np.random.Generator) -> WordsScene:
        word = "".join(map(str, rng.choice(list(LETTERS), size=len(PLACES))))
        return WordsScene(word, str(rng.choice(list(COLORS))))

    def changed(self, scene: WordsScene, rng: np.random.Generator) -> WordsScene:
        place = int(rng.integers(len(PLACES) + 1))
        if place == len(PLACES):
            return dataclasses.replace(scene, color=str(rng.choice(list(COLORS))))
        letters = list(scene.word)
        letters[place] = str(rng.choice(list(LETTERS)))
        return dataclasses.replace(scene, word="".join(letters))

    def all_scenes(self, style: str) -> tuple[WordsScene, ...]:
        words = map("".join, product(LETTERS, repeat=len(PLACES)))
        return tuple(WordsScene(word, style) for word in words)

    def parse(self, caption: str) -> WordsScene:
        _, quoted, after = [*caption.split('"'), "", ""][:3]
        scene = WordsScene(quoted.replace(" ", ""), after.removeprefix(" in "))
        known = len(scene.word) == len(PLACES) and set(scene.word) <= set(LETTERS)
        if scene.caption != caption or not known or scene.color not in COLORS:
            raise ValueError(f"not a caption of a word: {caption!r}")
        return scene

    def elements(self, scene: WordsScene) -> list[tuple[str, str]]:
        return [*zip(scene.word, PLACES), (scene.color, "color")]

    def draw(self, scene: WordsScene, rng: np.random.Generator | None = None) -> np.ndarray:
        """Paint the word; `rng` shifts it by up to JITTER pixels."""
        dx, dy = (0, 0) if rng is None else rng.integers(-JITTER, JITTER + 1, size=2)
        cover: np.ndarray = np.zeros((SIZE, SIZE), np.float32)
        for number, letter in enumerate(scene.word):
            left = LEFT + CELL * number
            cover[:, left : left + CELL] = glyph(letter)
        cover = np.roll(cover, (int(dy), int(dx)), (0, 1))
        return paint(canvas(BACKGROUND, SIZE), cover, COLORS[scene.color]) / 255

    def attributes(
        self, images: torch.Tensor, scenes: Sequence[WordsScene]
    ) -> list[dict[str, bool]]:
        """Check each letter in its place, the color, and `clean`.

        Letters are read in any colour. `clean`: pixels lie between the background and the colour.
        """
        ink, found, stray = _ink(images)
        share = ink.mean((1, 2))
        words, colors = _read(ink), list(COLORS)
        results = []
        for n, scene in enumerate(scenes):
            inked = INKED[0] <= share[n].item() <= INKED[1]
            letters = zip(PLACES, words[n], scene.word)
            results.append(
                {place: inked and seen == asked for place, seen, asked in letters}
                | {
                    "color": inked and colors[int(found[n])] == scene.color,
                    "clean": stray[n].item() <= MAX_STRAY,
                }
            )
        return results


@cache
def glyph(letter: str) -> np.ndarray:
    """Return the coverage [SIZE, CELL] in [0, 1] of a capital letter in the middle of its cell."""
    scale = SUPERSAMPLING
    font = ImageFont.load_default(FONT * scale)
    image = Image.new("L", (3 * CELL * scale, SIZE * scale))
    middle = (image.width / 2, image.height / 2)
    draw = ImageDraw.Draw(image)
    # "s": all stand on one line, which is so far below the middle that capitals lie around it
    base = middle[1] + font.getbbox("H", anchor="ls")[1] / -2
    stroke = STROKE * scale
    draw.text((middle[0], base), letter, 255, font, anchor="ms", stroke_width=stroke)
    left, top, right, bottom = image.getbbox() or (0, 0, *image.size)
    width = min(right - left, WIDEST * scale)
    drawn = image.crop((left, top, right, bottom)).resize((width, bottom - top))
    cell = Image.new("L", (CELL * scale, SIZE * scale))
    cell.paste(drawn, ((cell.width - width) // 2, top))
    return np.asarray(cell.resize((CELL, SIZE), Image.Resampling.BOX), dtype=np.float32) / 255


def _ink(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Explain images [N, 3, H, W] in [0, 1] by ink of one colour on the background.

    Returns the ink [N, H, W] in [0, 1], the index [N] of its colour in COLORS, and the RMS distance
    [N] of the pixels to the line from the background to that colour.
    """
    background = torch.tensor(BACKGROUND).float()[:, None, None] / 255
    above = images - background
    inks, strays = [], []
    for color in COLORS.values():
        line = torch.tensor(color).float()[:, None, None] / 255 - background
        ink = ((above * line).sum(1) / line.square().sum()).clamp(0, 1)
        inks.append(ink)
        strays.append((above - ink[:, None] * line).square().mean((1, 2, 3)).sqrt())
    stray, found = torch.stack(strays, 1).min(1)
    return torch.stack(inks, 1)[torch.arange(len(images)), found], found, stray


def _read(ink: torch.Tensor) -> list[str]:
    """Return the word in each ink [N, H, W]; a space is a letter that is not recognised."""
    shifts = 2 * REACH + 1
    rows = F.pad(ink, (REACH, REACH, REACH, REACH))
    # [N, letters, shifts of y, shifts of x, SIZE * CELL]
    cells = torch.stack(
        [
            rows.unfold(1, SIZE, 1).unfold(2, CELL, 1)[:, :, left : left + shifts].flatten(3)
            for left in range(LEFT, SIZE - LEFT, CELL)
        ],
        1,
    )
    areas, ious = cells.sum(-1), []
    for letter in LETTERS:
        cover = torch.from_numpy(glyph(letter)).flatten()
        both = torch.minimum(cells, cover).sum(-1)
        ious.append((both / (areas + cover.sum() - both)).amax((2, 3)))
    best, which = torch.stack(ious, -1).max(-1)
    return [
        "".join(LETTERS[w] if iou >= MIN_IOU else " " for iou, w in zip(*row))
        for row in zip(best.tolist(), which.tolist())
    ]
