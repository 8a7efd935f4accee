"""A model is loaded with all its weights and no others, whatever its library would only log."""

import re

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    T5Config,
    T5EncoderModel,
)

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.hub.pretrained import load_whole

SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
}


MODELS = {  # a way to make one, the class that loads it, and one of its weights
    "clip": (
        lambda: CLIPTextModel(CLIPTextConfig(**SMALL)),
        CLIPTextModel,
        "layers.0.mlp.fc1.weight",
    ),
    "t5": (
        lambda: T5EncoderModel(
            T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)
        ),
        T5EncoderModel,
        "SelfAttention.q.weight",
    ),
    "vae": (
        lambda: AutoencoderKL(block_out_channels=(8,), norm_num_groups=4),
        AutoencoderKL,
        "encoder.conv_in.weight",
    ),
}
CHANGES = {  # what is done to the file -> what the error says
    "lacking": (lambda state, name: state.pop(name), "lacks .*{name}"),
    "surplus": (
        lambda state, name: state.update({"layers.9.weight": torch.zeros(2)}),
        r"has the unknown layers\.9\.weight",
    ),
    "wrapped": (
        lambda state, name: state.update({f"_orig_mod.{name}": state.pop(name)}),
        "lacks .*{name}",
    ),
    "integers": (
        lambda state, name: state.update({name: state[name].to(torch.int8)}),
        r"model\.safetensors: .*{name} is int8, and weights are floating-point numbers",
    ),
    "resized": (lambda state, name: state.update({name: state[name][:-1].contiguous()}), "{name}"),
}


@pytest.mark.parametrize("which", MODELS)
def test_a_model_comes_back_with_what_an_older_version_saved_beside_it(which, tmp_path):
    make, kind, _ = MODELS[which]
    made = make()
    made.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    save_file(
        load_file(file) | {"layers.0.relative_position_index": torch.zeros(2)},
        file,
        {"format": "pt"},
    )
    loaded = load_whole(kind, tmp_path, dtype=torch.float32)
    assert type(loaded) is type(made)
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, made.state_dict()[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    "which, change",
    [*(("clip", change) for change in CHANGES), ("t5", "lacking"), ("vae", "wrapped")],
)
def test_one_tensor_that_has_no_counterpart_is_named(which, change, tmp_path):
    make, kind, end = MODELS[which]
    make().save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    state = load_file(file)
    name = next(name for name in state if name.endswith(end))
    alter, said = CHANGES[change]
    alter(state, name)
    save_file(state, file, {"format": "pt"})
    with pytest.raises(UserError, match=said.format(name=re.escape(end))):
        load_whole(kind, tmp_path, dtype=torch.float32)
