"""Which prompt is whose in a folder of images, and which images can be scored."""

import numpy as np
import pytest
from PIL import Image

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.inference.folder import OPEN, batches, check_images, pair, read_image
from g2rpo_core.inference.pictures import png
from g2rpo_core.rewards.preprocess import check_pairs, in_eight_bits


@pytest.fixture
def folder(tmp_path):
    """Pictures of three prompts whose names do not sort as the prompts do."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, prompt in (("base-10000-0", "third"), ("base-1001-0", "second"), ("base-0001-0", "first")):
        (folder / f"{name}.png").write_bytes(png(Image.new("RGB", (4, 4)), {"prompt": prompt, "seed": 0}))
    return folder


def test_pictures_have_the_prompts_that_stand_in_them(folder, tmp_path):
    """The n-th line for the n-th file would give two of three the wrong one; another one is refused by name."""
    assert dict(pair(folder, None).to_numpy()) == {
        "base-0001-0.png": "first",
        "base-1001-0.png": "second",
        "base-10000-0.png": "third",
    }
    (tmp_path / "lines.txt").write_text("first\nsecond\nthird\n")
    with pytest.raises(UserError, match="lines.txt: gives base-10000-0.png; base-1001-0.png another prompt than the one that"):
        pair(folder, tmp_path / "lines.txt")


def test_without_prompts_the_folders_own_list_is_read_or_asked_for(folder):
    Image.new("RGB", (4, 4)).save(folder / "other.png")
    with pytest.raises(UserError, match="other.png does not say its prompt: give --prompts"):
        pair(folder, None)
    (folder / "prompts.csv").write_text("file,prompt,seed\nother.png,mine,0\n")
    assert pair(folder, None).to_dict("list") == {"file": ["other.png"], "prompt": ["mine"]}


def test_a_line_is_a_prompt_as_the_pipeline_reads_it(tmp_path):
    """Without the byte order mark, in NFC, and not split at a line separator of Unicode."""
    (tmp_path / "images").mkdir()
    for name in "ab":
        Image.new("RGB", (4, 4)).save(tmp_path / "images" / f"{name}.png")
    (tmp_path / "prompts.txt").write_text("\ufeffa cafe\u0301\na\u2028b\n")
    assert pair(tmp_path / "images", tmp_path / "prompts.txt").prompt.tolist() == ["a caf\u00e9", "a b"]


def test_a_name_that_is_not_utf_8_is_said(tmp_path):
    (tmp_path / "caf\udce9.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"caf\\udce9.png: the name is not UTF-8: rename it"):
        pair(tmp_path, None)


def test_all_damaged_images_are_named_at_once(folder):
    whole = (folder / "base-0001-0.png").read_bytes()
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(whole[:40])
    with pytest.raises(UserError, match=r"a\.png: cannot be read.*; .*b\.png: cannot be read"):
        check_images(folder, sorted(path.name for path in folder.iterdir()))


def test_sixteen_bits_have_the_range_of_eight(tmp_path):
    """A grey ramp is neither clipped to white nor black, and a range that nobody knows is refused."""
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(8, 0)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    image = read_image(tmp_path / "ramp.png")
    assert image.mode == "L" and np.array_equal(np.asarray(image)[0], np.arange(256))
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(UserError, match="float.tiff: is of mode F: floating-point numbers, whose black and white are not known"):
        read_image(tmp_path / "float.tiff")
    with pytest.raises(ValueError, match="call `in_eight_bits` on them first"):
        check_pairs([Image.fromarray(ramp)], ["a ramp"])
    check_pairs([in_eight_bits(Image.fromarray(ramp))], ["a ramp"])


def test_of_what_moves_the_first_frame_is_said_to_count(tmp_path, capsys):
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue", "green")]
    frames[0].save(tmp_path / "moves.gif", save_all=True, append_images=frames[1:])
    assert check_images(tmp_path, ["moves.gif"]) == [16]
    assert "note: of what moves, one frame is scored: moves.gif (the first frame of 3)\n" in capsys.readouterr().err
    assert read_image(tmp_path / "moves.gif").convert("RGB").getpixel((0, 0)) == (255, 0, 0)


def test_an_image_of_too_many_pixels_is_refused_and_few_large_ones_are_open(tmp_path):
    Image.new("1", (9000, 9000)).save(tmp_path / "large.png")
    with pytest.raises(UserError, match="large.png: has 81 megapixels, more than 67"):
        read_image(tmp_path / "large.png")
    assert batches([OPEN // 2] * 3 + [1] * 65) == [slice(0, 2), slice(2, 66), slice(66, 68)]
