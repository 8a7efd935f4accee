"""Which prompt is whose in a folder of images, and which images can be scored."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import natural
from g2rpo_core.inference.folder import batches, check_images, pair
from g2rpo_core.inference.pictures import TEXT, png
from g2rpo_core.rewards import registry
from g2rpo_core.rewards.limits import MOST_FRAMES, OPEN
from g2rpo_core.rewards.preprocess import check_pairs, in_eight_bits, read_image
from tests.fixtures.errors import refused
from tests.fixtures.images import photograph


@pytest.fixture
def folder(tmp_path):
    """Pictures of three prompts whose names do not sort as the prompts do."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, prompt in (
        ("base-10000-0", "third"),
        ("base-1001-0", "second"),
        ("base-0001-0", "first"),
    ):
        (folder / f"{name}.png").write_bytes(
            png(Image.new("RGB", (4, 4)), {"prompt": prompt, "seed": 0})
        )
    return folder


def test_pictures_have_the_prompts_that_stand_in_them(folder, tmp_path):
    """Another one is refused by name."""
    assert dict(pair(folder, None).to_numpy()) == {
        "base-0001-0.png": "first",
        "base-1001-0.png": "second",
        "base-10000-0.png": "third",
    }
    (tmp_path / "lines.txt").write_text("first\nthird\nsecond\n")
    with pytest.raises(
        UserError,
        match="lines.txt: gives base-1001-0.png; base-10000-0.png another prompt than the one that",
    ):
        pair(folder, tmp_path / "lines.txt")


def images(folder, *names: str):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(folder / name)
    return folder


@pytest.mark.parametrize(
    "names",
    [
        [f"{n}.png" for n in range(12)],
        [f"image ({n}).png" for n in (1, 2, 10, 11, 100)],
        ["a1b2.png", "a1b10.png", "a2b1.png", "a10b1.png"],
        [f"{n:02d}.png" for n in range(12)],
        ["01.png", "1.png", "2.png"],
    ],
)
def test_line_n_is_for_the_nth_image_as_people_count_and_both_ends_are_said(
    tmp_path, capsys, names
):
    (tmp_path / "p.txt").write_text("".join(f"a drawing of {name}\n" for name in names))
    table = pair(images(tmp_path / "images", *names), tmp_path / "p.txt")
    assert table.file.tolist() == names and table.prompt.tolist() == [
        f"a drawing of {name}" for name in names
    ]
    said = f"{names[0]} is 'a drawing of {names[0]}', …, {names[-1]} is 'a drawing of {names[-1]}'"
    assert (
        capsys.readouterr().err == f"note: line n is for the n-th image in natural order: {said}\n"
    )


@given(st.lists(st.integers(0, 10**20), unique=True, min_size=1))
def test_numbered_names_sort_as_their_numbers(numbers):
    assert sorted((f"img_{n}.png" for n in numbers), key=natural) == [
        f"img_{n}.png" for n in sorted(numbers)
    ]


def test_hidden_files_are_no_images(tmp_path):
    """Those of macOS beside each file and in its archives, caches, and lists of Windows."""
    folder = images(tmp_path / "images", "a.png", ".hidden.png", "__MACOSX/a.png", ".cache/b.png")
    for name in ("._a.png", "Thumbs.db", ".DS_Store"):
        (folder / name).write_bytes(b"Mac OS X")
    (tmp_path / "p.txt").write_text("a cat\n")
    assert pair(folder, tmp_path / "p.txt").to_dict("list") == {
        "file": ["a.png"],
        "prompt": ["a cat"],
    }
    (folder / "a.png").unlink()
    with pytest.raises(UserError, match="images: holds no image"):
        pair(folder, tmp_path / "p.txt")


@pytest.mark.parametrize(
    "name, text",
    [
        ("metadata.csv", "file_name,text\nb.png,a cat\na.png,a dog\n"),
        ("metadata.csv", "filename;Caption\nb.png;a cat\na.png;a dog\n"),
        ("metadata.csv", "Image,TEXT\nb.png,a cat\na.png,a dog\n"),
        ("metadata.csv", "image_path\tcaption\nb.png\ta cat\na.png\ta dog\n"),
        (
            "metadata.jsonl",
            (
                '{"file_name": "b.png", "caption": "a cat"}\n'
                '{"file_name": "a.png", "caption": "a dog"}\n'
            ),
        ),
        ("prompts.csv", "file,prompt,seed\nb.png,a cat,0\na.png,a dog,0\n"),
    ],
)
def test_lists_of_others_are_read_from_the_folder_and_by_name(tmp_path, name, text):
    folder = images(tmp_path / "images", "a.png", "b.png")
    (folder / name).write_text(text)
    expected = {"file": ["b.png", "a.png"], "prompt": ["a cat", "a dog"]}
    assert (
        pair(folder, None).to_dict("list")
        == expected
        == pair(folder, folder / name).to_dict("list")
    )


def test_an_imagefolder_has_its_images_in_subfolders_with_one_list_or_one_in_each(tmp_path):
    folder = images(tmp_path / "images", "train/2.png", "train/10.png", "test/1.png")
    (folder / "metadata.csv").write_text("file_name,prompt\ntrain/10.png,ten\ntest/1.png,one\n")
    assert dict(pair(folder, None).to_numpy()) == {"train/10.png": "ten", "test/1.png": "one"}
    (folder / "metadata.csv").unlink()
    (folder / "train" / "metadata.csv").write_text("file_name,text\n10.png,ten\n2.png,two\n")
    with pytest.raises(
        UserError,
        match=(
            "images/test: has no prompts.csv or metadata.csv or metadata.jsonl, "
            "which other subfolders"
        ),
    ):
        pair(folder, None)
    (folder / "test" / "metadata.jsonl").write_text('{"file_name": "1.png", "text": "one"}\n')
    assert dict(pair(folder, None).to_numpy()) == {
        "train/10.png": "ten",
        "train/2.png": "two",
        "test/1.png": "one",
    }
    (tmp_path / "lines.txt").write_text("one\ntwo\nten\n")
    assert dict(pair(folder, tmp_path / "lines.txt").to_numpy()) == {
        "test/1.png": "one",
        "train/2.png": "two",
        "train/10.png": "ten",
    }


def test_a_text_beside_an_image_is_its_prompt(tmp_path, folder):
    images(tmp_path / "mine", "1.png", "2.jpg")
    for name, text in (("1.txt", "\ufeffa  cat,\nsitting\n"), ("2.caption", "a dog")):
        (tmp_path / "mine" / name).write_text(text)
    assert dict(pair(tmp_path / "mine", None).to_numpy()) == {
        "1.png": "a cat, sitting",
        "2.jpg": "a dog",
    }
    (tmp_path / "mine" / "2.txt").write_text("a hound")
    with pytest.raises(
        UserError, match="mine: 2.jpg has 2.txt and 2.caption: remove one, or give --prompts"
    ):
        pair(tmp_path / "mine", None)
    (tmp_path / "mine" / "2.txt").unlink()
    (tmp_path / "mine" / "2.caption").write_text("\u200b\n")
    with pytest.raises(UserError, match="mine: the prompt of 2.jpg is empty"):
        pair(tmp_path / "mine", None)
    (folder / "base-0001-0.txt").write_text("another")  # beside a picture that says what it is of
    with pytest.raises(
        UserError,
        match=(
            "gives base-0001-0.png another prompt than the one that the picture says it is of: "
            "correct it"
        ),
    ):
        pair(folder, None)


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "file_name,caption,text\na.png,x,y\n",
            (
                "the columns `caption` and `text` could both be the prompt: "
                "name the right one `prompt`"
            ),
        ),
        (
            "file_name,filename,prompt\na.png,b.png,x\n",
            "the columns `file_name` and `filename` could both be the file",
        ),
        (
            "path,Image,caption\na.png,b.png,x\n",
            "the columns `path` and `Image` could both be the file: name the right one `file`",
        ),
        ("file,prompt,prompt\na.png,x,y\n", "has two columns `prompt`: name one of them otherwise"),
        (
            "file_name,label\na.png,1\n",
            (
                "has no column `prompt` (or prompts, caption, captions, text, texts), "
                "only file_name, "
                "label"
            ),
        ),
        (
            "caption\nx\n",
            (
                "has no column `file` (or file_name, filename, file_path, filepath, image, "
                "image_file, image_name, image_path, img, img_path, path), only caption"
            ),
        ),
        (
            "name,label\na.png,1\n",
            (
                "has no column `file` (or file_name, filename, file_path, filepath, image, "
                "image_file, image_name, image_path, img, img_path, path) and no column "
                "`prompt` (or prompts, "
                "caption, captions, text, texts), only name, label"
            ),
        ),
        ("file,prompt\n../a.png,x\n", "../a.png is not an image in "),
        ("file,prompt\n.a.png,x\n", ".a.png is not an image in "),
    ],
)
def test_a_list_that_may_mean_two_things_is_refused_by_name(tmp_path, text, message):
    folder = images(tmp_path / "images", "a.png", "b.png", ".a.png", "../a.png")
    (folder / "metadata.csv").write_text(text)
    with refused(f"metadata.csv.*{re.escape(message)}"):
        pair(folder, None)


def test_two_lists_in_a_folder_are_refused_and_ours_wins(tmp_path):
    folder = images(tmp_path / "images", "a.png")
    (folder / "metadata.csv").write_text("file_name,text\na.png,one\n")
    (folder / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "two"}\n')
    with refused("images: has metadata.csv and metadata.jsonl: give one of them by --prompts"):
        pair(folder, None)
    (folder / "prompts.csv").write_text("file,prompt\na.png,ours\n")
    assert pair(folder, None).prompt.tolist() == ["ours"]


def test_what_is_transparent_is_seen_on_white_however_the_file_says_so(tmp_path):
    """By hand, also for palettes, grey and a colour as alpha."""
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0] = (255, 0, 0, 0), (0, 0, 0, 128), (0, 0, 255, 255)
    Image.fromarray(rgba, "RGBA").save(tmp_path / "rgba.png")
    assert np.asarray(read_image(tmp_path / "rgba.png")).tolist() == [
        [[255, 255, 255], [127, 127, 127], [0, 0, 255]]
    ]
    Image.fromarray(rgba[..., [0, 3]], "LA").save(tmp_path / "la.png")
    assert np.asarray(read_image(tmp_path / "la.png")).tolist() == [[[255] * 3, [127] * 3, [0] * 3]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 255, 0])
    palette.putpixel((1, 0), 1)
    palette.save(tmp_path / "p.png", transparency=0)
    assert np.asarray(read_image(tmp_path / "p.png")).tolist() == [[[255, 255, 255], [0, 255, 0]]]
    Image.new("RGB", (1, 1), (9, 8, 7)).save(tmp_path / "key.png", transparency=(9, 8, 7))
    assert np.asarray(read_image(tmp_path / "key.png")).tolist() == [[[255, 255, 255]]]
    Image.new("L", (1, 1), 9).save(tmp_path / "grey.png")
    assert read_image(tmp_path / "grey.png").mode == "L"  # what has no transparency stays as it is


SIDES = [(1, 101), (101, 1), (1, 200_000), (200_000, 1), (3, 301), (2**13, 2**13 + 1), (70, 1)]


def test_every_image_of_a_size_that_no_reward_takes_is_named_before_any_is_scored(tmp_path):
    """467 bytes of 1 x 200,000 became 5 GiB; RapidOCR took 74 s and 10 GB for 3 x 300."""
    for number, side in enumerate([*SIDES, (1, 100), (10, 80), (10, 81)]):
        Image.new("1", side).save(tmp_path / f"{number}.png")
    with pytest.raises(UserError) as error:
        check_images(tmp_path, [f"{number}.png" for number in range(10)], ["hps", "ocr", "mine"])
    said = str(error.value).split("; ")
    assert ["/6.png" in each for each in said].count(True) == 0
    assert [re.search(r"/(\d)\.png", each)[1] for each in said] == [*"012345", "7", "9"]
    assert "one side over 100 times the other: crop it" in said[2]
    assert "8192 x 8193" not in said[5] and "has 67 megapixels, more than 67" in said[5]
    assert "ocr: has 10 x 81 pixels: text is read in images up to 8 times as high" in said[7]
    for images in ([Image.new("RGB", (1, 101))], torch.zeros(1, 3, 101, 1)):
        with refused("an image has 1 x 101 pixels, one side over 100 times the other"):
            check_pairs(images, ["a"])
    check_pairs([Image.new("RGB", (1, 100))], ["a"])


def test_frames_of_a_tiff_are_counted_up_to_a_limit(tmp_path):
    """Pillow's count takes a time that grows with the square of their number."""
    frames = [Image.new("1", (1, 1)) for _ in range(MOST_FRAMES + 5)]
    for count, counted in ((1, 1), (3, 3), (MOST_FRAMES + 5, MOST_FRAMES)):
        frames[0].save(tmp_path / "x.tiff", save_all=True, append_images=frames[1:count])
        image = read_image(tmp_path / "x.tiff")
        assert image.info["frames"] == counted and image.size == (1, 1)


DEEP = "[" * 100_000
TEXTS = [DEEP, '{"prompt": ' * 20_000, "[]", "1", '"a"', "null", "NaN", "", "{", "9" * 5000]
TEXTS += [f'{{"prompt": {value}}}' for value in ("1", "null", "[]", "NaN", '{"a": 1}', "true")]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("how", ["tEXt", "zTXt", "iTXt"])
def test_what_stands_in_a_picture_may_be_anything(tmp_path, text, how):
    """16 texts in three forms."""
    info = PngInfo()
    if how == "iTXt":
        info.add_itxt(TEXT, text)
    else:
        info.add_text(TEXT, text, zip=how == "zTXt")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png", pnginfo=info)
    with refused("a.png does not say its prompt: give --prompts"):
        pair(tmp_path, None)
    (tmp_path / "p.txt").write_text("a cat\n")
    assert pair(tmp_path, tmp_path / "p.txt").prompt.tolist() == ["a cat"]


@pytest.mark.parametrize(
    "prompt, message",
    [("\ud800", "has the character"), ("a\0b", "has the character"), ("x" * 4001, "over 4000")],
)
def test_a_prompt_in_a_picture_that_no_encoder_takes_is_refused(tmp_path, prompt, message):
    (tmp_path / "a.png").write_bytes(png(Image.new("RGB", (4, 4)), {"prompt": prompt}))
    with refused(f"a.png.*{message}"):
        pair(tmp_path, None)


@pytest.mark.pipeline
@pytest.mark.parametrize("name", ["hps", "clip_score", "pickscore", "image_reward"])
def test_every_reward_scores_what_is_seen_and_not_what_lies_under_alpha(models, name):
    scorer = registry.load([name], models)[name]
    seen = photograph(40, 40)
    under = [
        Image.merge("RGBA", (*photograph(40, 40, seed).split(), Image.new("L", (40, 40), 0)))
        for seed in (1, 2)
    ]
    white = Image.new("RGB", (40, 40), "white")
    scores = scorer([*under, white, seen], ["a red circle"] * 4).tolist()
    assert scores[:3] == pytest.approx([scores[0]] * 3, rel=1e-5) and scores[3] != pytest.approx(
        scores[0], rel=1e-3
    )


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
    assert pair(tmp_path / "images", tmp_path / "prompts.txt").prompt.tolist() == [
        "a caf\u00e9",
        "a b",
    ]


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
    """A ramp is not clipped; a range that nobody knows is refused."""
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(8, 0)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    image = read_image(tmp_path / "ramp.png")
    assert image.mode == "L" and np.array_equal(np.asarray(image)[0], np.arange(256))
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "float.tiff")
    with refused("float.tiff: is of mode F: floating-point numbers, whose black and white are"):
        read_image(tmp_path / "float.tiff")
    with pytest.raises(ValueError, match="call `in_eight_bits` on them first"):
        check_pairs([Image.fromarray(ramp)], ["a ramp"])
    check_pairs([in_eight_bits(Image.fromarray(ramp))], ["a ramp"])


def test_of_what_moves_the_first_frame_is_said_to_count(tmp_path, capsys):
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue", "green")]
    frames[0].save(tmp_path / "moves.gif", save_all=True, append_images=frames[1:])
    assert check_images(tmp_path, ["moves.gif"]) == [16]
    assert (
        "note: of what moves, one frame is scored: moves.gif (the first frame of 3)\n"
        in capsys.readouterr().err
    )
    assert read_image(tmp_path / "moves.gif").convert("RGB").getpixel((0, 0)) == (255, 0, 0)


def test_an_image_of_too_many_pixels_is_refused_and_few_large_ones_are_open(tmp_path):
    Image.new("1", (9000, 9000)).save(tmp_path / "large.png")
    with pytest.raises(UserError, match="large.png: has 81 megapixels, more than 67"):
        read_image(tmp_path / "large.png")
    assert batches([OPEN // 2] * 3 + [1] * 65) == [slice(0, 2), slice(2, 66), slice(66, 68)]
