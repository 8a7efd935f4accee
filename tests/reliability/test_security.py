"""Nothing from outside runs, leaves its folder, steers what shows it, or learns a secret."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from g2rpo_core.config import profile_path, study_path
from g2rpo_core.distributed import checkpoint
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.manifest import sha256
from g2rpo_core.hub.pickled import read_pickled


class Harmful:
    """What a pickle can do: a file appears where it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path, form):
    harm, file = tmp_path / "harm", tmp_path / "weights.pt"
    if form == "torch":
        torch.save({"weight": torch.ones(2), "more": Harmful(harm)}, file)
    else:
        file.write_bytes(pickle.dumps(Harmful(harm)))
    with pytest.raises(UserError, match="is damaged or holds more than weights, so it is not read"):
        read_pickled(file)
    assert not harm.exists()


METADATA = b"torch.distributed.checkpoint.metadata"
CODE_IN_AN_INDEX = {
    "a call": lambda harm: pickle.dumps(Harmful(harm)),
    "a way around": lambda _: (
        b"\x80\x04\x8c\x25" + METADATA + b"\x8c\x15Metadata.__init__.mro\x93."
    ),
    "an attribute": lambda _: b"cbuiltins\ngetattr\n(c" + METADATA + b"\nMetadata\nVmro\ntR.",
}


@pytest.mark.parametrize("way", CODE_IN_AN_INDEX)
def test_a_checkpoint_whose_index_would_run_code_is_refused(here, way):
    """Its manifest fits: a stranger could put all of it into a shared folder."""
    kept = checkpoint.Checkpoints(checkpoint.ROOT, 1)
    kept.save(3, {"weight": torch.ones(2)}, [{"iteration": 3}])
    kept.finish()
    (saved,) = checkpoint.checkpoints(checkpoint.ROOT)
    harm, index = here / "harm", saved / ".metadata"
    manifest = json.loads((saved / checkpoint.MANIFEST).read_text())
    state = {"weight": torch.zeros(2)}
    checkpoint.load_state(saved, state)
    assert state["weight"].tolist() == [1, 1]
    index.write_bytes(CODE_IN_AN_INDEX[way](harm))
    manifest["files"][".metadata"] = {"size": index.stat().st_size, "sha256": sha256(index)}
    (saved / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    assert checkpoint.load_records(saved) == [{"iteration": 3}]
    with pytest.raises(
        UserError, match=r"iteration-000003: .*its index names .* so it is not read"
    ):
        checkpoint.load_state(saved, state)
    assert not harm.exists()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "..", "", "a\0b", "-x"])
def test_no_name_leads_out_of_its_folder(name):
    for path in (profile_path, study_path):
        with pytest.raises(UserError, match="is not a valid name"):
            path(name)
