"""A manifest vouches for the very files that it was written for, or for nothing."""

import shutil
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from g2rpo_core.foundation.manifest import find_whole, read_sealed, write_manifest, write_sealed
from tests.reliability.test_generated_inputs import FIXED, damage, damages

FILES = {"a.bin": b"0123456789" * 9, "deep/b.json": b"{}"}


def lay_out(home: Path) -> tuple[Path, Path]:
    """A folder of FILES and its manifest, both new."""
    shutil.rmtree(home, ignore_errors=True)
    folder, manifest = home / "folder", home / "whole.json"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    write_manifest(manifest, folder, about={"records": [1.5, float("inf")]})
    return folder, manifest


@settings(max_examples=60, **FIXED)
@given(damages, st.sampled_from([*FILES, "manifest"]))
def test_whatever_changes_a_file_or_its_manifest_it_vouches_no_more(tmp_path_factory, how, name):
    folder, manifest = lay_out(tmp_path_factory.getbasetemp() / "vouched")
    assert find_whole(manifest, folder) == {"records": [1.5, float("inf")]}
    file = manifest if name == "manifest" else folder / name
    before = file.read_bytes()
    shutil.copy(file, aside := folder.with_name("aside"))
    damage(aside, file, how)
    changed = not file.exists() or file.read_bytes() != before
    assert (find_whole(manifest, folder) is None) == changed


def test_a_missing_file_and_one_too_many_are_named(tmp_path, capsys):
    folder, manifest = lay_out(tmp_path / "home")
    (folder / "more").touch()
    assert find_whole(manifest, folder) is None and find_whole(manifest, folder, ["more"])
    (folder / "a.bin").unlink()
    assert find_whole(manifest, folder, ["more"]) is None
    first, second = capsys.readouterr().err.splitlines()
    assert "more does not belong to it; it is not used, but made again" in first
    assert f"{folder}: a.bin is gone" in second


def test_sealed_data_come_back_as_they_were(tmp_path):
    value = {"b": [1, None, 0.1], "a": "\ud800"}
    write_sealed(tmp_path / "new" / "x.json", value)
    found = read_sealed(tmp_path / "new" / "x.json")
    assert found == value and list(found) == ["b", "a"]
