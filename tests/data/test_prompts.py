import json
import unicodedata

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2rpo_core.data.prompts import (
    Prompt,
    distinct,
    held_out,
    prompt_order,
    read_prompts,
)
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.texts import comparable, unprintable, unseen
from tests.fixtures.errors import refused

ROWS = [
    {"prompt": "a cat, sitting", "style": "photo"},
    {"prompt": " ", "style": ""},
    {"prompt": "ein Hund 🐕", "style": "anime"},
]


def written(folder, suffix):
    path = folder / f"mine.{suffix}"
    if suffix == "txt":
        path.write_text("\n".join(row["prompt"] for row in ROWS), encoding="utf-8")
    elif suffix == "csv":
        pd.DataFrame(ROWS).to_csv(path, index=False)
    elif suffix == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    else:
        pd.DataFrame(ROWS).to_parquet(path)
    return path


@pytest.mark.parametrize("suffix", ["txt", "csv", "jsonl", "parquet"])
def test_every_format_gives_the_same_prompts(tmp_path, suffix):
    styles = ["", ""] if suffix == "txt" else ["photo", "anime"]
    assert read_prompts(written(tmp_path, suffix)) == [
        Prompt("mine-000000", "a cat, sitting", styles[0]),
        Prompt("mine-000002", "ein Hund 🐕", styles[1]),
    ]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("none.txt", None, "no such prompt file"),
        ("empty.txt", "\n \n", "holds no prompt"),
        ("x.csv", "words,style\na,b\n", "no column `prompt` (or prompts, caption, captions, text"),
        ("twice.csv", "prompt,style,style\na,b,c\n", "two columns have the same name"),
        ("x.jsonl", '{"prompt": "a"}\n{oops\n', "row 2: Expecting property name"),
        ("x.parquet", "not parquet", "is not a Parquet file, or its beginning is damaged"),
        ("n.jsonl", '{"prompt": "a"}\n1\n', "row 2: is no object with a `prompt`"),
        ("escape.txt", "a\x1b[31mb\n", "row 1 has the control character '\\x1b'"),
        (
            "comma.csv",
            "prompt,style\na cat, sitting,photo\n",
            "with quotes around a text with a co",
        ),
        (
            "utf16.txt",
            "a cat\n".encode("utf-16"),
            "is not UTF-8 (byte 0xff at 0); save it as UTF-8",
        ),
    ],
)
def test_bad_files_are_named_with_what_is_wrong(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        read_prompts(path)
    assert message in str(error.value) and name in str(error.value) and "\n" not in str(error.value)


def test_columns_that_say_more_than_a_prompt_are_told_and_others_are_not(tmp_path, capsys):
    more = ["image", "Images", "media", "video_path", "mask", "src_img", "edited_image"] + [
        "conditioning_image",
        "Negative Prompt",
        "negative_prompt",
        "instruction",
    ]
    files = {"target": "target/1.PNG", "hint": ["a.png"]}
    less = {"file_name": "1.png", "image_id": "7", "style": "x", "source": "coco", "videos": []}
    row = {"prompt": "make it red"} | dict.fromkeys(more, "x") | files | less
    (tmp_path / "edits.jsonl").write_text(f"{json.dumps(row)}\n" * 3 + '{"prompt": "a cat"}')
    read_prompts(tmp_path / "edits.jsonl")
    assert capsys.readouterr().err == (
        f"warning: {tmp_path}/edits.jsonl: only its prompts are used, not its columns "
        f"{', '.join([*more, *files])}; 2 of 4 rows repeat a prompt\n"
    )


A, B = "a cat, sitting", "ein Hund; groß"


@pytest.mark.parametrize(
    "name, content",
    [
        ("marked.csv", f'\ufeffPrompts,Category\r\n"{A}",x\r\n{B},y\r\n'),
        ("semicolon.csv", f'style;prompt\nx;{A}\ny;"{B}"\n'),
        ("caption.json", json.dumps([{"caption": A}, {"caption": B}])),
        (
            "ours_wins.jsonl",
            f'{{"text": "no", "prompt": "{A}"}}\n{{"text": "no", "prompt": "{B}"}}\n',
        ),
    ],
)
def test_what_others_write_is_read_as_they_mean_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode())
    assert [prompt.text for prompt in read_prompts(tmp_path / name)] == [A, B]


def test_a_text_that_differs_in_spaces_or_unicode_form_alone_is_one_prompt(tmp_path):
    (tmp_path / "same.txt").write_text(
        "caf\u00e9  noir\n cafe\u0301 noir\t\nthe\n", encoding="utf-8"
    )
    assert [prompt.text for prompt in read_prompts(tmp_path / "same.txt")] == [
        "caf\u00e9 noir",
        "the",
    ]


@pytest.mark.parametrize("text", ["A  red Circle", "a \uff52ed circ\u200dle"])
def test_what_looks_like_a_test_prompt_is_not_trained_on_nor_kept_twice(text):
    alike, dog, test = (
        Prompt("0", text, ""),
        Prompt("1", "a dog", ""),
        Prompt("2", "a red circle", ""),
    )
    assert held_out([alike, dog], [test]) == ([dog], 1)
    assert distinct([test, alike, dog]) == [test, dog]
    with refused("all 2 training prompts are also test prompts"):
        held_out([alike, test], [test])


@given(st.text())
def test_texts_compare_as_they_look_whatever_they_are_written_with(text):
    once = comparable(text)
    assert comparable(once) == once and (unseen(text) or once or unprintable(text))
    assert comparable(f"\ufeff {unicodedata.normalize('NFD', text)}\u200b\u00ad") == comparable(
        f" {text} "
    )
    assert unseen(
        "".join(char for char in text if char.isspace()) + "\u200b\u2060\ufeff\u00ad\u3164"
    )


def test_every_epoch_visits_every_prompt_once_in_an_order_of_its_own():
    epochs = [
        [
            index
            for iteration in range(5 * epoch, 5 * epoch + 5)
            for index in prompt_order(iteration, 2, 10, seed=3)
        ]
        for epoch in range(3)
    ]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    across = [index for iteration in range(10) for index in prompt_order(iteration, 3, 10, seed=3)]
    assert across == [index for epoch in epochs for index in epoch]
