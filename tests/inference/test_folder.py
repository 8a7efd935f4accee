"""Which prompt is whose in a folder of images, and which images can be scored."""

import os
import re

import numpy as np
import pytest
from PIL import Image

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.inference.folder import check_images, images_in, pair
from g2rpo_core.rewards.preprocess import read_image
from tests.fixtures.errors import refused


def images(folder, *names: str):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(folder / name)
    return folder


def test_line_n_is_for_the_nth_image_as_people_count(tmp_path):
    names = ["a1b2.png", "a1b10.png", "a2b1.png", "a10b1.png"]
    (tmp_path / "p.txt").write_text("".join(f"of {name}\n" for name in names))
    table = pair(images(tmp_path / "images", *names), tmp_path / "p.txt")
    assert table.to_numpy().tolist() == [[name, f"of {name}"] for name in names]


@pytest.mark.parametrize(
    "name, text",
    [
        ("metadata.csv", "filename;Caption\nb.png;a cat\nsub/a.png;a dog\n"),
        (
            "metadata.jsonl",
            (
                '{"image_path": "b.png", "text": "a cat"}\n'
                '{"image_path": "./sub/a.png", "text": "a dog"}\n'
            ),
        ),
    ],
)
def test_lists_are_read_from_the_folder_and_by_name(tmp_path, name, text):
    folder = images(tmp_path / "images", "sub/a.png", "b.png", "c.png")
    (folder / name).write_text(text)
    expected = [["b.png", "a cat"], ["sub/a.png", "a dog"]]
    for given in (None, folder / name):
        assert pair(folder, given).to_numpy().tolist() == expected


def test_a_text_beside_an_image_is_its_prompt(tmp_path):
    folder = images(tmp_path / "mine", "1.png", "sub/2.jpg")
    (folder / "1.txt").write_text("\ufeffa  cat,\nsitting\n")
    assert pair(folder, None).to_numpy().tolist() == [["1.png", "a cat, sitting"]]
    (folder / "1.txt").unlink()
    with refused("1.png: has no prompt: give --prompts, or write it into 1.txt"):
        pair(folder, None)


@pytest.mark.parametrize(
    "name, text, message",
    [
        (
            "p.csv",
            "path,Image,caption\na.png,b.png,x\n",
            "`path` and `Image` could both be",
        ),
        ("p.csv", "name,prompt\na.png,x\n", "has no column `file` (or file_name, "),
        ("p.csv", "file,prompt\n../a.png,x\n", "../a.png is not an image in "),
        (
            "p.jsonl",
            '{"file": "a.png", "prompt": "x"}\n{"prompt": "y"}\n',
            "1 of 2 rows have a file",
        ),
        ("p.txt", "one\n", "1 lines for the 2 images in "),
        ("p.txt", "one\n \n", "the prompt of b.png is empty"),
    ],
)
def test_a_list_that_does_not_fit_is_refused_by_name(tmp_path, name, text, message):
    folder = images(tmp_path / "images", "a.png", "b.png", "../a.png")
    (tmp_path / name).write_text(text)
    with refused(f"{name}.*{re.escape(message)}"):
        pair(folder, tmp_path / name)


def test_an_image_file_starts_no_program(tmp_path, monkeypatch):
    """Pillow has Ghostscript draw PostScript, whatever the file's name."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "x.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")
    with refused(r"x.png: cannot be read: .*\(cannot identify image file"):
        read_image(tmp_path / "x.png")
    assert not (tmp_path / "started").exists()


def test_a_name_with_a_control_character_is_shown_with_it(tmp_path):
    with refused(r"b\\nc.png has '\\n': a name must be UTF-8 without control characters"):
        pair(images(tmp_path, "b\nc.png"), None)


def test_what_is_transparent_is_seen_on_white_however_the_file_says_so(tmp_path):
    """By hand, also for a palette."""
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0] = (255, 0, 0, 0), (0, 0, 0, 128), (0, 0, 255, 255)
    Image.fromarray(rgba, "RGBA").save(tmp_path / "rgba.png")
    assert np.asarray(read_image(tmp_path / "rgba.png")).tolist() == [
        [[255, 255, 255], [127, 127, 127], [0, 0, 255]]
    ]
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 255, 0])
    palette.putpixel((1, 0), 1)
    palette.save(tmp_path / "p.png", transparency=0)
    assert np.asarray(read_image(tmp_path / "p.png")).tolist() == [[[255, 255, 255], [0, 255, 0]]]


def test_every_image_that_no_reward_takes_is_named_before_any_is_scored(tmp_path):
    """467 bytes of 1 x 200,000 became 5 GiB; RapidOCR took 74 s and 10 GB for 3 x 300."""
    sides = [(200_000, 1), (2**13, 2**13 + 1), (10, 81), (100, 1), (10, 80)]
    for number, side in enumerate(sides):
        Image.new("1", side).save(tmp_path / f"{number}.png")
    (tmp_path / "damaged.png").write_bytes((tmp_path / "4.png").read_bytes()[:40])
    with pytest.raises(UserError) as error:
        check_images(tmp_path, images_in(tmp_path), ["hps", "ocr", "mine"])
    expected = [
        "0.png: has 200000 x 1 pixels, one side over 100 times the other: crop it",
        "1.png: has 67 megapixels, more than 67",
        "2.png: ocr: has 10 x 81 pixels: text is read in images up to 8 times as high",
        "damaged.png: cannot be read",
    ]
    for said, part in zip(str(error.value).split("; "), expected, strict=True):
        assert part in said


def test_sixteen_bits_have_the_range_of_eight(tmp_path):
    """A ramp is not clipped; a range that nobody knows is refused."""
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(8, 0)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    image = read_image(tmp_path / "ramp.png")
    assert np.array_equal(np.asarray(image)[0, :, 0], np.arange(256))
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "float.tiff")
    with refused("float.tiff: is of mode F: floating-point numbers, whose black and white are"):
        read_image(tmp_path / "float.tiff")
