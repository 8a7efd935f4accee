"""What was made already, found by what decides it."""

from pathlib import Path

import pytest

from g2rpo_core.hub import made
from g2rpo_core.tiny_models.settings import FitSettings

SETTINGS = FitSettings(steps=4, batch=8, learning_rate=1e-3)


@pytest.fixture
def key(here) -> str:
    """Of an output `first` that is made and noted."""
    Path("code").mkdir()
    Path("code", "a.py").write_text("a = 1")
    Path("first").mkdir()
    Path("first", "weights").write_text("made")
    made.note(key := made.key_of(SETTINGS, [Path("code")], "native"), Path("first"))
    return key


def test_an_equal_output_is_linked_and_replaces_what_was_there(key):
    Path("second").mkdir()
    Path("second", "older").touch()
    assert made.reuse(key, Path("second"))
    assert [path.name for path in Path("second").iterdir()] == ["weights"] and Path(
        "second/weights"
    ).samefile("first/weights")


@pytest.mark.parametrize(
    "change, output",
    [
        (lambda key: Path("first", "weights").write_text("other"), "second"),
        (lambda key: Path("first").rename("elsewhere"), "second"),
        (lambda key: (made.MADE / f"{key}.json").write_text("{"), "second"),
        (lambda key: None, "first"),  # its own folder
    ],
)
def test_what_is_not_as_it_was_made_is_not_used(key, change, output, tmp_path):
    change(key)
    assert not made.reuse(key, Path(output))
    assert not Path("second").exists() and not list(tmp_path.glob(".*.linked"))
