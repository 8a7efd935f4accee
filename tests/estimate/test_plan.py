"""The plan's arithmetic against the true configuration and what smaller models really take."""

import json
from functools import partial

import pytest
import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig

from g2rpo_core.architectures import zimage
from g2rpo_core.architectures.flux import TRANSFORMER, Flux
from g2rpo_core.architectures.sd3 import MEDIUM, StableDiffusion3
from g2rpo_core.architectures.table import known_shape
from g2rpo_core.cli.main import main
from g2rpo_core.estimate import machines, tracing
from g2rpo_core.estimate.machines import Machines, Rate
from g2rpo_core.estimate.plan import PROMPT_TOKENS, Work, make_plan
from g2rpo_core.models import cost
from g2rpo_core.models.settings import LoraSettings
from tests.conftest import ROOT
from tests.fixtures.commands import refusal, run_here
from tests.fixtures.errors import refused
from tests.pipeline.test_flux_profiles import NAME, PROFILES

FLUX = Flux()
SMALL = TRANSFORMER | {
    "num_layers": 2,
    "num_single_layers": 3,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
}
SMALL_SD3 = MEDIUM | {  # two blocks with a second attention, two without
    "num_layers": 4,
    "dual_attention_layers": (0, 1),
    "num_attention_heads": 2,
    "caption_projection_dim": 128,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "pos_embed_max_size": 16,
}
SMALL_ZIMAGE = zimage.TRANSFORMER | {
    "dim": 256,
    "n_layers": 3,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 64,
}
SMALLS = {
    "flux": (FLUX, SMALL),
    "sd3": (StableDiffusion3(), SMALL_SD3),
    "zimage": (zimage.ZImage(), SMALL_ZIMAGE),
}
DEEPER = {
    "flux": {"num_layers": 4, "num_single_layers": 5},
    "sd3": {"num_layers": 7, "dual_attention_layers": (0, 1, 2)},
    "zimage": {"n_layers": 5},
}
LORA = LoraSettings(rank=4, alpha=4.0)


@pytest.mark.parametrize(
    "repo, weights, positions",
    [
        ("black-forest-labs/FLUX.1-dev", 11_901_408_320, 0),
        ("stabilityai/stable-diffusion-3.5-medium", 2_243_171_520, 384**2 * 1536),
        ("Qwen/Qwen-Image", 20_430_401_088, 0),
    ],
)
def test_weights_of_the_published_configurations(repo, weights, positions):
    base, shape = known_shape(repo)
    counts = tracing.transformer_parameters(base, shape.transformer, None)
    assert counts.all == counts.trained == weights and counts.buffers == positions


def test_a_lora_is_counted_as_peft_makes_it():
    targets = ("to_q", "to_out.0", "proj_mlp")
    with torch.device("meta"):
        model = FluxTransformer2DModel(**SMALL)
        model.add_adapter(LoraConfig(r=4, target_modules=list(targets)))
    made = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)
    lora = LoraSettings(rank=4, alpha=4.0, target_modules=targets)
    assert tracing.transformer_parameters(FLUX, SMALL, lora).trained == made


def allocated(work) -> int:
    """Most bytes at once that the CPU's allocator gave out, by PyTorch's profiler."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiled:
        work()
    events = [
        event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "name, training, checkpointing",
    [("flux", False, False), ("flux", True, True), ("sd3", True, False)],
)
def test_memory_is_what_a_small_model_really_takes(name, training, checkpointing):
    """The profiler's peak on real tensors, beside that of the trace without data."""
    base, small = SMALLS[name]
    model = base.transformer(**small).train()
    if checkpointing:
        model.enable_gradient_checkpointing()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    arguments = base.inputs(small, 3, 128, 64, "cpu")

    def work():
        with torch.set_grad_enabled(training):
            output = model(**arguments)[0]
            output = torch.stack(output) if isinstance(output, list) else output
            if training:
                output.sum().backward()

    work()
    call = cost.Call(3, 128, 64, torch.float32, training, checkpointing=checkpointing)
    assert cost.traced_cost(base, small, call).bytes == pytest.approx(allocated(work), rel=0.1)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "name, lora",
    [("sd3", LORA), ("zimage", LORA)],
)
def test_shallow_models_tell_the_cost_of_a_deep_one(name, lora):
    base, deep = SMALLS[name][0], SMALLS[name][1] | DEEPER[name]
    call = cost.Call(2, 128, 64, torch.bfloat16, True, lora, True)
    told, traced = cost.transformer_cost(base, deep, call), cost.traced_cost(base, deep, call)
    assert told.flops == traced.flops and told.bytes == pytest.approx(traced.bytes, rel=0.03)


def test_operations_are_those_of_the_matrix_products():
    """Two for every weight and token, and attention's two products; modulation is less."""
    tokens, width = 2025 + 512, 3072
    # attention's four and the MLP's eight widths, for the tokens of both streams
    blocks = (19 + 38) * 12 * width**2
    attention = (19 + 38) * 4 * tokens**2 * width
    call = partial(cost.Call, 1, 2025, 512, torch.bfloat16)
    flops = lambda training: cost.transformer_cost(FLUX, TRANSFORMER, call(training)).flops
    forward = 2 * blocks * tokens + attention
    assert flops(False) == pytest.approx(forward, rel=0.02)
    # flash attention makes its scores again on its way back
    assert flops(True) == pytest.approx(3 * forward + attention / 2, rel=0.02)


@pytest.mark.pipeline
def test_the_papers_setting():
    on = Machines(16, 141, nodes=2)
    made = make_plan(PROFILES[NAME], "g2rpo", on, 16)
    pairs = make_plan(PROFILES[NAME], "g2rpo", on, rate=Rate(ms=100.0))
    assert made.fits and not make_plan(PROFILES[NAME], "g2rpo", Machines(1, 80)).fits
    assert (made.evaluations_per_prompt, made.evaluations_per_iteration) == (1700, 27_200)
    weights = 11_901_408_320 * 4 / 16 / 2**30
    assert made.memory_gib["weights"] == pytest.approx(weights, abs=0.001)
    assert made.memory_gib["optimizer"] == pytest.approx(2 * weights, abs=0.001)
    assert pairs.memory_gib["weights"] == pytest.approx(2 * weights, abs=0.001)
    assert pairs.seconds["rollout"] == pytest.approx(170.0)
    # A window that moves is planned over all its positions
    moved = make_plan(PROFILES[NAME], "mix_grpo", on).evaluations_per_prompt
    assert 12 * 4 < moved < 12 * 25 and moved != int(moved)


def test_what_processes_send_is_what_rings_send():
    """Two processes with half of the weights each: an update gathers twice and sums once."""
    counts = tracing.Parameters(all=100, trained=100, block=10, rest=5)
    sent = partial(
        machines.sent, counts=counts, width=2, rollout_calls=3, updates=[4], kl=False,
        replica=False, every_call=False,
    )  # fmt: skip
    one_node, two_nodes = (Machines(4, 80, nodes, inside=1e-9, between=1e-10) for nodes in (1, 2))
    gigabytes, seconds = sent(machines.Sharding(one_node, 4))
    assert gigabytes["rollout"] * 1e9 == seconds["rollout"] == 3 * 200 * 3 / 4
    assert gigabytes["update"] * 1e9 == 4 * 2 * 200 * 3 / 4 + 400 * 3 / 4
    pairs, slower = sent(machines.Sharding(two_nodes, 2))
    assert pairs["rollout"] * 1e9 == slower["rollout"] == 3 * 200 / 2  # inside a node
    # its parts are summed between nodes
    summed = 4 * 2 * 200 / 2 + 400 / 2 + 10 * 2 * (400 / 2) / 2
    assert slower["update"] == pytest.approx(summed)
    assert sent(machines.Sharding(Machines(1, 80), 1)) == ({}, {})


@pytest.mark.pipeline
def test_the_command_speaks_to_machines_and_says_what_is_wrong():
    words = ("plan", "--profile", "flux_hps_clip", "--memory", "141", "--gpus", "16")
    made = json.loads(run_here(main, *words, "--json", "--rate", "93", folder=ROOT).stdout)
    assert made["ms_per_evaluation"] == 93 and made["rate"] == "given" and made["fits"]
    assert "19 transformer_blocks, 38 single_transformer_blocks" in made["can_learn"][0]
    for wrong, message in (
        (["--gpus", "5"], "--gpus 5: 16 prompts per iteration cannot be shared evenly"),
        (["--card", "v100"], "plan: --card v100: not one of h100"),
        (["--shard", "5"], "plan: --shard 5 must divide --gpus 16"),
    ):
        assert message in refusal(main, *words, *wrong, folder=ROOT)


def test_a_small_flux_is_planned_and_what_a_cpu_trains_is_not():
    with refused("builds its own small models, for a CPU"):
        make_plan(PROFILES["tiny"], "g2rpo", Machines(1, 80))


def test_time_is_that_of_prompts_of_usual_length_where_padding_is_left_out():
    """Memory is still that of the longest prompt which the profile lets in."""
    for name, usual in (("zimage_lora_1gpu", PROMPT_TOKENS), ("flux2_klein_4b_lora_1gpu", 512)):
        work = Work(PROFILES[name], "g2rpo", Machines(1, 79), None)
        assert (work.tokens[1], work.usual[1]) == (512, usual)
