"""A LoRA that PEFT can write comes back through every form, or is refused by what is left."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from diffusers.models.modeling_utils import ModelMixin
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, VeloraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from g2rpo_core.architectures.table import read_architecture
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.weights.adapter import (
    PEFT_FILE,
    Matrices,
    add,
    in_diffusers_names,
    in_kohyas_names,
    in_peft_names,
    read_adapter,
)
from g2rpo_core.weights.stored import shapes_of, weights_in
from tests.fixtures.errors import refused
from tests.fixtures.weights import randomize

TWINS = ("flux", "sd3", "flux2", "zimage", "qwen_image")
LINEAR = (torch.nn.Linear, torch.nn.Conv2d)
EXAMPLES = settings(
    max_examples=6,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="session")
def bases(twin_pipeline, models):
    """bases(twin) -> the base model, its transformer's configuration, and weight shapes."""
    known = {}

    def base_of(twin):
        if twin not in known:
            folder = models / "pipeline" if twin == "flux" else twin_pipeline(twin) / "pipeline"
            base = read_architecture(folder)
            config = base.transformer.load_config(folder / "transformer")
            known[twin] = base, config, shapes_of(base, config)
        return known[twin]

    return base_of


def model(base, config) -> ModelMixin:
    """A transformer with random weights, the same every time, that does something."""
    torch.manual_seed(0)
    made = base.transformer.from_config(config).eval().requires_grad_(False)
    randomize(made)
    return made


def velocity(base, transformer) -> torch.Tensor:
    """Of random latents and texts; the transformer's own call, which takes no part of ours."""
    generator = torch.Generator().manual_seed(1)
    given = base.inputs(base.transformer.from_config(transformer.config).config, 2, 16, 6, "cpu")

    def drawn(value):
        if isinstance(value, list) and isinstance(value[0], torch.Tensor):
            return [drawn(one) for one in value]
        # Masks, positions and shapes stay
        if (
            not isinstance(value, torch.Tensor)
            or value.dtype == torch.bool
            or value.shape[-1] in (3, 4)
        ):
            return value
        draw = torch.rand if value.dim() == 1 else torch.randn
        return draw(value.shape, generator=generator)

    with torch.no_grad():
        output = transformer(**{name: drawn(value) for name, value in given.items()})[0]
    return torch.stack(output) if isinstance(output, list) else output


@st.composite
def loras(draw, base, config) -> LoraConfig:
    """What PEFT's LoraConfig can say of one."""
    names = [
        name for name, module in model(base, config).named_modules() if isinstance(module, LINEAR)
    ]
    ends = sorted({re.sub(r"^.*\.\d+\.(?=[a-z])", "", name) for name in names})
    targets = draw(st.lists(st.sampled_from([*ends, *names]), min_size=1, max_size=5, unique=True))
    patterns = st.dictionaries(st.sampled_from(targets), st.integers(1, 5), max_size=2)
    kind = draw(st.sampled_from(["plain", "dora", "bias"]))
    return LoraConfig(
        r=draw(st.integers(1, 5)),
        lora_alpha=draw(st.sampled_from([0.5, 1, 3, 8, 64])),
        target_modules=targets,
        rank_pattern=draw(patterns),
        alpha_pattern=draw(patterns),
        use_dora=kind == "dora",
        lora_bias=kind == "bias",
        use_rslora=draw(st.booleans()),
        init_lora_weights=draw(
            st.sampled_from([True, False, *([] if kind == "bias" else ["gaussian", "orthogonal"])])
        ),
    )


def written_by_peft(base, config, lora, folder, name="default") -> torch.Tensor:
    """Save a LoRA with random matrices by PEFT itself, and return the velocity that it gives."""
    try:
        adapted = get_peft_model(model(base, config), lora, adapter_name=name)
    except ValueError:  # it has no LoRA for such a module, or none of that name is there
        assume(False)
    generator = torch.Generator().manual_seed(2)
    for key, parameter in adapted.named_parameters():
        if ".lora_" in key and "magnitude" not in key:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        elif "magnitude" in key:
            parameter.data *= 1 + 0.3 * torch.rand(parameter.shape, generator=generator)
    shutil.rmtree(folder, ignore_errors=True)
    adapted.save_pretrained(folder)
    return velocity(base, adapted.base_model.model)


def read_back(base, config, shapes, folder) -> torch.Tensor:
    """The velocity of a new model with what is read from a folder."""
    file, lora = weights_in(folder)
    assert lora
    transformer = model(base, config)
    add(transformer, read_adapter(base, config, shapes, file))
    return velocity(base, transformer)


@pytest.mark.parametrize("twin", TWINS)
def test_what_peft_writes_comes_back_through_every_form(bases, twin, tmp_path):
    base, config, shapes = bases(twin)
    without = velocity(base, model(base, config))

    @EXAMPLES
    @given(lora=loras(base, config))
    def check(lora):
        with_lora = written_by_peft(base, config, lora, tmp_path / "peft")
        scale = with_lora.abs().max()
        assume(
            (with_lora - without).abs().max() > 1e-4 * scale
        )  # a last block's text goes nowhere, and equality shows nothing
        close = lambda one: torch.testing.assert_close(
            one / scale, with_lora / scale, rtol=0, atol=2e-5
        )
        close(read_back(base, config, shapes, tmp_path / "peft"))
        adapter = read_adapter(base, config, shapes, tmp_path / "peft" / PEFT_FILE)
        # In our words for PEFT, which PEFT reads
        tensors, about = in_peft_names(adapter, shapes)
        again = tmp_path / "again"
        for name in ("again", "lora", "kohya"):
            (tmp_path / name).mkdir(exist_ok=True)
        save_file(tensors, again / PEFT_FILE)
        (again / "adapter_config.json").write_text(json.dumps(about))
        loaded = PeftModel.from_pretrained(model(base, config), again).base_model.model
        assert {
            name for name, module in loaded.named_modules() if hasattr(module, "lora_A")
        } == adapter.keys()
        close(velocity(base, loaded))
        close(read_back(base, config, shapes, again))
        # For diffusers and ComfyUI
        lora_file = tmp_path / "lora" / "any.safetensors"
        save_file(in_diffusers_names(adapter), lora_file)
        close(read_back(base, config, shapes, lora_file.parent))
        # For sd-scripts
        kohya = tmp_path / "kohya" / "any.safetensors"
        if lora.use_dora or lora.lora_bias:
            with pytest.raises(UserError, match="have none for DoRA or a bias"):
                in_kohyas_names(base, config, shapes, adapter)
        else:
            save_file(in_kohyas_names(base, config, shapes, adapter), kohya)
            close(read_back(base, config, shapes, kohya.parent))

    check()


WRAPPED = {
    "parallel": lambda name: "module." + name,
    "compiled": lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
    "compiled blocks": lambda name: re.sub(r"(\.\d+)\.", r"\1._orig_mod.", name, count=1),
    "of an adapter with a name": lambda name: re.sub(r"(lora_[AB])\.", r"\1.default.", name),
    "without a prefix": lambda name: name.removeprefix("base_model.model."),
    "ComfyUI's": lambda name: name.replace("base_model.model.", "diffusion_model."),
    "diffusers'": lambda name: name.replace("base_model.model.", "transformer."),
    "down and up": lambda name: name.replace("lora_A", "lora_down").replace("lora_B", "lora_up"),
    "with points": lambda name: name.replace("lora_A", "lora.down").replace("lora_B", "lora.up"),
}


@pytest.fixture(scope="module")
def peft_lora(bases, tmp_path_factory):
    """peft_lora(twin) -> a folder that PEFT wrote (a LoRA on every layer), and its velocity."""
    known = {}

    def lora_of(twin):
        if twin not in known:
            base, config, _ = bases(twin)
            names = [
                name
                for name, module in model(base, config).named_modules()
                if isinstance(module, torch.nn.Linear)
            ]
            lora = LoraConfig(r=2, lora_alpha=3, target_modules="|".join(map(re.escape, names)))
            folder = tmp_path_factory.mktemp(twin) / "lora"
            known[twin] = folder, written_by_peft(base, config, lora, folder)
        return known[twin]

    return lora_of


def changed(source, target, change, rename=PEFT_FILE):
    """A copy of a folder whose tensors went through `change`."""
    shutil.copytree(source, target)
    tensors = load_file(target / PEFT_FILE)
    (target / PEFT_FILE).unlink()
    save_file(change(tensors), target / rename)
    return target


@pytest.mark.parametrize(
    "dtype, rank, alpha",
    [(torch.float8_e4m3fn, 4, 3.0), (torch.float16, 128, 1.0), (torch.bfloat16, 16, 12.0)],
)
def test_a_lora_of_any_dtype_is_scaled_in_float32(bases, dtype, rank, alpha, tmp_path):
    base, config, shapes = bases("flux")
    outputs, inputs = shapes["transformer_blocks.0.attn.to_q.weight"]
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    up = (1e-2 * torch.randn(3 * outputs, rank)).to(dtype)
    ends = {
        "lora_down.weight": torch.ones(rank, inputs).to(dtype),
        "lora_up.weight": up,
        "alpha": torch.tensor(alpha),
    }
    save_file({f"{key}.{end}": value for end, value in ends.items()}, tmp_path / "any")
    adapter = read_adapter(base, config, shapes, tmp_path / "any")
    expected = up.double() * alpha / rank
    kohyas = in_kohyas_names(base, config, shapes, adapter)[f"{key}.lora_up.weight"]
    close = partial(torch.testing.assert_close, rtol=1e-7, atol=0)
    close(kohyas.double(), torch.block_diag(*expected.chunk(3)))
    # In a file, too, whose parts of one tensor are three
    save_file(in_diffusers_names(adapter), tmp_path / "again")
    again = load_file(tmp_path / "again")
    name = "transformer.transformer_blocks.0.attn.to_{}.lora_B.weight"
    close(torch.cat([again[name.format(part)] for part in "qkv"]).double(), expected)


@pytest.mark.parametrize("how", [{"init_lora_weights": "MiCA"}, {"velora_config": VeloraConfig()}])
def test_a_kind_of_peft_that_differs_in_training_alone_is_a_lora(bases, how, tmp_path):
    base, config, shapes = bases("flux")
    lora = LoraConfig(r=2, lora_alpha=3, target_modules=["to_q", "proj_mlp"], **how)
    expected = written_by_peft(base, config, lora, tmp_path / "peft")
    torch.testing.assert_close(read_back(base, config, shapes, tmp_path / "peft"), expected)


def test_dora_in_onetrainers_names_is_read(bases, tmp_path):
    base, config, shapes = bases("flux")
    outputs, inputs = shapes["transformer_blocks.0.attn.to_q.weight"]
    down, up, norms = torch.randn(2, inputs), torch.randn(outputs, 2), torch.rand(outputs) + 1
    ends = {
        "lora_down.weight": down,
        "lora_up.weight": up,
        "dora_scale": norms[:, None],
        "alpha": torch.tensor(3.0),
    }
    file = tmp_path / "any.safetensors"
    module = "transformer_blocks_0_attn_to_q"
    save_file({f"lora_transformer_{module}.{end}": value for end, value in ends.items()}, file)
    (one,) = read_adapter(base, config, shapes, file).values()
    assert one.alpha == 3.0 and all(
        map(torch.equal, (one.down, one.up, one.magnitude), (down, up, norms))
    )


@pytest.mark.parametrize("how", WRAPPED)
def test_the_names_that_trainers_leave_are_undone(bases, peft_lora, how, tmp_path):
    folder, expected = peft_lora("flux")
    wrapped = changed(
        folder,
        tmp_path / "w",
        lambda tensors: {WRAPPED[how](name): value for name, value in tensors.items()},
    )
    torch.testing.assert_close(read_back(*bases("flux"), wrapped), expected)


def test_every_tensor_is_used_or_named(bases, peft_lora, tmp_path):
    """Whichever is missing, and whatever is added."""
    folder, _ = peft_lora("flux")
    tensors = load_file(folder / PEFT_FILE)
    name = min(tensors)
    less = changed(
        folder,
        tmp_path / "less",
        lambda tensors: {key: value for key, value in tensors.items() if key != name},
    )
    module = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
    with refused(f"lacks the first .* matrix of {re.escape(module)}"):
        read_back(*bases("flux"), less)
    deeper = re.sub(
        r"\d+", "77", next(name for name in sorted(tensors) if re.search(r"\.\d+\.", name)), count=1
    )
    end, ones = ".lora_A.weight", torch.ones(2, 2)
    for number, (key, value, message) in enumerate(
        (
            (deeper, ones, f"have no place in this.*{re.escape(deeper)}"),
            (
                f"text_encoder.text_model.encoder.layers.0.self_attn.q_proj{end}",
                ones,
                r"1 of its .* tensors are for a text encoder \(text_encoder.text_model",
            ),
            (name.replace(end, ".lokr_w1"), ones, "is a LoKr of LyCORIS, and 1 of its.*lokr_w1"),
            # modules_to_save, or a whole model's state
            (name.replace(end, ".weight"), ones, "have no place"),
            (name, tensors[name].char(), f"{re.escape(name)} is int8, and weights are floating"),
            (name, tensors[name][:0], f"{re.escape(module)} has rank 0"),
            (
                name.replace(end, ".alpha"),
                ones,
                r" has alpha \[\[1.0, 1.0\], \[1.0, 1.0\]\], which",
            ),
        )
    ):
        added = changed(
            folder, tmp_path / f"more{number}", lambda tensors, more={key: value}: tensors | more
        )
        with refused(message):
            read_back(*bases("flux"), added)


@pytest.mark.parametrize(
    "says, message",
    [
        ({"r": 4}, "has rank 2, and its configuration says 4"),
        ({"use_dora": True}, "lacks the magnitudes of DoRA"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            r"asks for what is not computed here \(init_lora_weights: pissa_niter_4\)",
        ),
        ({"bias": "all"}, "bias: all"),
        ({"something_new": {"of": "PEFT"}}, "something_new"),
    ],
)
def test_what_a_configuration_says_is_followed_or_refused(
    bases, peft_lora, says, message, tmp_path
):
    folder, _ = peft_lora("flux")
    other = changed(folder, tmp_path / "other", lambda tensors: tensors)
    about = other / "adapter_config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | says))
    with pytest.raises(UserError, match=message):
        read_back(*bases("flux"), other)
    about.unlink()
    with refused("adapter_config.json: does not exist: .* is a LoRA of PEFT, whose alpha stands"):
        read_back(*bases("flux"), other)


@pytest.mark.parametrize(
    "targets, lacks",
    [
        (["to_q", "proj_out"], ["proj_out", "transformer_blocks.0.attn.to_q"]),
        (["to_q", "of_another_model"], ["transformer_blocks.0.attn.to_q"]),
        (["transformer_blocks.0.attn.to_q"], ["transformer_blocks.0.attn.to_q"]),
        ([".to_k", "to_k", "add_q_proj"], []),
        (r"proj_out", ["proj_out"]),
        (r".*\.to_[qk]", []),
        ("all-linear", []),
    ],
)
def test_modules_that_a_configuration_targets_and_a_file_lacks_are_told(
    bases, peft_lora, targets, lacks, tmp_path, capsys
):
    """PEFT drops layers of an adapter whose name is theirs, as `0`."""
    without = re.compile(r"model\.(transformer_blocks\.0\.attn\.to_q|proj_out)\.")
    less = changed(
        peft_lora("flux")[0],
        tmp_path / "less",
        lambda tensors: {key: tensors[key] for key in tensors if not without.search(key)},
    )
    about = less / "adapter_config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"target_modules": targets}))
    read_back(*bases("flux"), less)
    told = capsys.readouterr().err
    assert told.count("\n") == bool(lacks)
    assert told.rpartition("target_modules name: ")[2].strip() == "; ".join(lacks)


@pytest.mark.parametrize("twin", TWINS)
def test_diffusers_reads_what_we_write_as_we_do(bases, peft_lora, twin, tmp_path):
    base, config, shapes = bases(twin)
    folder, expected = peft_lora(twin)
    save_file(
        in_diffusers_names(read_adapter(base, config, shapes, folder / PEFT_FILE)),
        tmp_path / "any.safetensors",
    )
    transformer = model(base, config)
    weights = base.pipeline.lora_state_dict(
        tmp_path, weight_name="any.safetensors", local_files_only=True
    )
    alphas = {"network_alphas": None} if twin == "flux" else {}
    base.pipeline.load_lora_into_transformer(weights, transformer=transformer, **alphas)
    scale = expected.abs().max()
    torch.testing.assert_close(
        velocity(base, transformer) / scale, expected / scale, rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("twin", ["flux", "flux2", "zimage", "qwen_image"])
def test_kohyas_names_are_those_that_diffusers_converts(bases, twin, tmp_path):
    """At FLUX's width. diffusers drops layers outside the blocks, or takes scales for shifts."""
    base = bases(twin)[0]
    config = base.shallow(next(iter(base.published.values())).transformer)[0]
    shapes = shapes_of(base, config)
    inside = {
        name.removesuffix(".weight"): Matrices(
            torch.randn(2, shape[1]), torch.randn(shape[0], 2), alpha=3.0
        )
        for name, shape in shapes.items()
        if len(shape) == 2 and re.search(r"\.\d+\.", name) and not name.startswith("all_")
    }
    save_file(in_kohyas_names(base, config, shapes, inside), tmp_path / "any.safetensors")
    weights = base.pipeline.lora_state_dict(
        tmp_path, weight_name="any.safetensors", local_files_only=True
    )
    assert {name.removesuffix(".lora_A.weight") for name in weights if "lora_A" in name} == {
        f"transformer.{name}" for name in inside
    }
    for module, one in inside.items():
        x = torch.randn(one.down.shape[1])
        expected = one.merged().up @ (one.down @ x)
        up, down = (weights[f"transformer.{module}.lora_{side}.weight"] for side in "BA")
        torch.testing.assert_close(up @ (down @ x), expected, rtol=1e-4, atol=1e-3)
