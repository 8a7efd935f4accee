"""`g2rpo profile show` as a user runs it."""

import subprocess
import sys

import pytest

from g2rpo_core.cli.main import main
from g2rpo_core.config import load_profile, method_of, sampling_of, training_of
from tests.conftest import ROOT
from tests.fixtures.commands import run_here

pytestmark = pytest.mark.pipeline


@pytest.mark.parametrize("name", ["tiny_verdict", "flux_lora_1gpu"])
def test_what_is_shown_is_the_whole_profile_with_where_each_value_comes_from(tmp_path, name):
    done = run_here(main, "profile", "show", name, folder=ROOT)
    assert done.returncode == 0, done.stderr
    (tmp_path / "shown.yaml").write_text(done.stdout)
    shown, profile = load_profile(tmp_path / "shown.yaml"), load_profile(ROOT / "profiles" / f"{name}.yaml")
    for section in set(type(profile).model_fields) - {"methods"}:
        assert getattr(shown, section) == getattr(profile, section), section
    assert list(shown.methods) == list(profile.methods)
    for method in profile.methods:
        assert method_of(shown.methods, method) == method_of(profile.methods, method)
        assert sampling_of(shown.sampling, shown.methods, method) == sampling_of(profile.sampling, profile.methods, method)
        assert training_of(shown.training, shown.methods, method) == training_of(profile.training, profile.methods, method)
    comments = [line.partition("# ")[2] for line in done.stdout.splitlines() if "# " in line]
    assert any(comment.startswith(f"profiles/{name}.yaml:") for comment in comments)
    assert "default" in comments and "published" in comments


def test_an_unknown_profile_ends_in_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "g2rpo_core.cli", "profile", "show", "tinny"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.startswith("error: profiles/tinny.yaml: no such profile; there are ")
    assert done.stderr.count("\n") == 1
