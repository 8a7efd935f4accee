"""Which files of a folder are read, and under which names: as diffusers reads them."""

import json
import shutil

import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import load_file, save_file

from g2rpo_core.architectures.table import read_architecture
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.loading import load_transformer
from g2rpo_core.weights.stored import choose, shapes_of, weights_in
from tests.fixtures.errors import refused

WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SHARDS = [f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]


def save(base, folder, value: float, name=WEIGHTS, **others):
    """A transformer of which every weight is `value`."""
    config = base.transformer.load_config(folder.parent / "base")
    tensors = {
        key: torch.full(shape, value) for key, shape in shapes_of(base, config).items()
    } | others
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return tensors


@pytest.fixture
def base(models, tmp_path):
    """The base model; the configuration of its transformer is in `base`."""
    (tmp_path / "base").mkdir()
    shutil.copy(models / "pipeline" / "transformer" / "config.json", tmp_path / "base")
    return read_architecture(models / "pipeline")


def read(base, folder) -> float:
    """The value of every weight that is read from a folder; diffusers must read the same."""
    place, lora = weights_in(folder)
    assert not lora
    config = next(parent / "base" for parent in folder.parents if (parent / "base").exists())
    transformer = load_transformer(
        base, place, torch.device("cpu"), torch.float32, trained=False, config=config
    )
    (value,) = {
        number for parameter in transformer.parameters() for number in parameter.unique().tolist()
    }
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        shutil.copy(config / "config.json", folder)
        theirs = base.transformer.from_pretrained(folder)
        assert all(
            torch.equal(one, other)
            for one, other in zip(transformer.parameters(), theirs.parameters())
        )
    return value


@pytest.mark.parametrize("variant, expected", [(None, 2.0), ("fp16", 7.0), ("ema", 8.0)])
def test_a_variant_is_chosen_by_its_name(base, tmp_path, variant, expected):
    """Of a whole pipeline's files, with an index of the variant or without."""
    run = tmp_path / "transformer"
    save(base, run, 2.0)
    shards(base, run, 7.0, ".fp16")
    save(base, run, 8.0, "diffusion_pytorch_model.ema.safetensors")
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / WEIGHTS).touch()
    chosen = choose(tmp_path, list(tmp_path.rglob("*")), variant)
    assert chosen.parent == run and read(base, chosen) == expected
    with pytest.raises(UserError, match="has no weights of variant bf16, only "):
        choose(tmp_path, list(tmp_path.rglob("*")), "bf16")


def shards(base, folder, value: float, variant: str = "") -> None:
    """Save in two files with an index."""
    tensors = save(base, folder, value, "whole")
    (folder / "whole").unlink()
    files = [shard.replace(".safetensors", f"{variant}.safetensors") for shard in SHARDS]
    where = {name: files[number % 2] for number, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in where if where[name] == file}, folder / file)
    index = INDEX.replace(".json", f"{variant}.json")
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def test_the_index_says_what_belongs_together(base, tmp_path):
    """Beside a whole file and shards of an older save, which diffusers does not read either."""
    shards(base, tmp_path / "run", 2.0)
    save(base, tmp_path / "run", 7.0)
    save(base, tmp_path / "run", 8.0, "diffusion_pytorch_model-00001-of-00003.safetensors")
    assert read(base, tmp_path / "run") == 2.0
    (tmp_path / "run" / SHARDS[1]).unlink()
    with refused(f"{SHARDS[1]}: does not exist, and {INDEX} names it: to read {WEIGHTS}, delete"):
        read(base, tmp_path / "run")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "model.diffusion_model."])
def test_the_names_that_trainers_leave_are_undone(base, tmp_path, prefix):
    tensors = save(base, tmp_path / "run", 2.0, "any.safetensors")
    wrapped = {prefix + name: value for name, value in tensors.items()}
    save_file(wrapped, tmp_path / "run" / "any.safetensors")
    assert read(base, tmp_path / "run") == 2.0


@pytest.mark.parametrize(
    "twin, convert",
    [("flux", None), ("zimage", "convert_z_image_transformer_checkpoint_to_diffusers")],
)
def test_weights_under_the_original_names_come_back(twin, convert, twin_pipeline, models, tmp_path):
    """FLUX.1's own converter assumes its width: it is compared in test_export."""
    folder = models / "pipeline" if twin == "flux" else twin_pipeline(twin) / "pipeline"
    base = read_architecture(folder)
    weights = load_file(folder / "transformer" / WEIGHTS)
    config = base.transformer.load_config(folder / "transformer")
    renamed = base.original(weights, config)
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "any.safetensors")
    read = load_transformer(
        base,
        weights_in(tmp_path)[0],
        torch.device("cpu"),
        torch.float32,
        trained=False,
        config=folder / "transformer",
    )
    assert all(torch.equal(value, weights[name]) for name, value in read.state_dict().items())
    if convert:
        theirs = getattr(single_file_utils, convert)(dict(renamed))
        assert theirs.keys() == weights.keys() and all(
            torch.equal(theirs[name], value) for name, value in weights.items()
        )
