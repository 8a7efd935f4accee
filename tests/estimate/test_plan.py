"""The plan's arithmetic against the true configuration and what smaller models really take."""

import json
import shutil
from functools import partial

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from peft import LoraConfig

from g2rpo_core.architectures import flux2, qwen_image, zimage
from g2rpo_core.architectures.flux import TRANSFORMER, VAE, Flux
from g2rpo_core.architectures.sd3 import MEDIUM, StableDiffusion3
from g2rpo_core.architectures.table import known_shape
from g2rpo_core.cli.main import main
from g2rpo_core.config import load_profile
from g2rpo_core.estimate import machines, tracing
from g2rpo_core.estimate.budget import changed, changes, cheapest, ways
from g2rpo_core.estimate.cards import CARDS, card_of, rate_of
from g2rpo_core.estimate.machines import Machines, Rate
from g2rpo_core.estimate.plan import PROMPT_TOKENS, Work, make_plan
from g2rpo_core.estimate.tracing import make_encoder
from g2rpo_core.models import cost
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.rewards.ocr import SECONDS
from tests.conftest import ROOT
from tests.fixtures.commands import refusal, run_here
from tests.fixtures.errors import refused

FLUX, SD3, FLUX2, ZIMAGE, QWEN = (
    Flux(),
    StableDiffusion3(),
    flux2.Flux2Klein(),
    zimage.ZImage(),
    qwen_image.QwenImage(),
)
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
SMALL_FLUX2 = flux2.TRANSFORMER | {
    "num_layers": 2,
    "num_single_layers": 3,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
}
SMALL_ZIMAGE = zimage.TRANSFORMER | {
    "dim": 256,
    "n_layers": 3,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 64,
}
SMALL_QWEN = qwen_image.TRANSFORMER | {
    "num_layers": 3,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
}
SMALLS = pytest.mark.parametrize(
    "base, small",
    [
        (FLUX, SMALL),
        (SD3, SMALL_SD3),
        (FLUX2, SMALL_FLUX2),
        (ZIMAGE, SMALL_ZIMAGE),
        (QWEN, SMALL_QWEN),
    ],
    ids=["flux", "sd3", "flux2", "zimage", "qwen_image"],
)
LORA = LoraSettings(rank=4, alpha=4.0)
VAES = {
    "AutoencoderKL": 83_819_683,
    "AutoencoderKLFlux2": 84_046_115,
    "AutoencoderKLQwenImage": 126_892_531,
}


@pytest.mark.parametrize(
    "repo, weights, positions",
    [
        ("black-forest-labs/FLUX.1-dev", 11_901_408_320, 0),  # as its checkpoint holds
        ("black-forest-labs/FLUX.1-schnell", 11_891_178_560, 0),
        (
            "stabilityai/stable-diffusion-3.5-medium",
            2_243_171_520,
            384**2 * 1536,
        ),  # 2.47 B with its table of positions
        ("stabilityai/stable-diffusion-3.5-large", 8_056_627_520, 192**2 * 2432),
        ("black-forest-labs/FLUX.2-klein-base-4B", 3_875_544_576, 0),
        ("black-forest-labs/FLUX.2-klein-base-9B", 9_078_581_248, 0),
        ("Tongyi-MAI/Z-Image", 6_154_908_736, 0),
        ("Qwen/Qwen-Image", 20_430_401_088, 0),
    ],
)
def test_weights_of_the_published_configurations(repo, weights, positions):
    base, shape = known_shape(repo)
    counts = tracing.transformer_parameters(base, shape.transformer, None)
    assert counts.all == counts.trained == weights and counts.buffers == positions
    assert tracing.count_parameters(lambda: base.vae(**shape.vae)) == VAES[base.vae.__name__]


@pytest.mark.parametrize(
    "repo, weights",
    [
        ("stabilityai/stable-diffusion-3.5-medium", [123_650_304, 694_659_840, 4_762_310_656]),
        ("black-forest-labs/FLUX.2-klein-base-4B", [4_022_468_096]),
        ("black-forest-labs/FLUX.2-klein-base-9B", [8_190_735_360]),
        ("Tongyi-MAI/Z-Image", [4_022_468_096]),
        ("Qwen/Qwen-Image", [8_292_166_656]),
    ],
)
def test_weights_of_the_published_text_encoders(repo, weights):
    count = lambda encoder: tracing.count_parameters(partial(make_encoder, *encoder))
    _, shape = known_shape(repo)
    assert [count(encoder) for encoder in shape.encoders.values()] == weights


@pytest.mark.pipeline
def test_classifier_free_guidance_is_planned_as_two_evaluations():
    profile = load_profile(ROOT / "profiles" / "sd35_medium_lora_1gpu.yaml")
    guided = make_plan(profile, "mix_grpo", Machines(1, 24))
    sampling = profile.sampling.model_copy(update={"guidance": 1.0})
    alone = make_plan(profile.changed(sampling=sampling), "mix_grpo", Machines(1, 24))
    assert guided.evaluations_per_prompt == 2 * alone.evaluations_per_prompt
    assert guided.latents_per_call == {"rollout": 4, "update": 4} and alone.latents_per_call == {
        "rollout": 8,
        "update": 8,
    }
    for phase in ("rollout", "update"):
        assert guided.seconds[phase] == pytest.approx(2 * alone.seconds[phase], rel=0.01)
    assert guided.fits and not make_plan(profile, "mix_grpo", Machines(1, 16)).fits


def test_a_lora_is_counted_as_peft_makes_it():
    targets = ("to_q", "to_out.0", "proj_mlp")
    with torch.device("meta"):
        model = FluxTransformer2DModel(**SMALL)
        model.add_adapter(LoraConfig(r=4, target_modules=list(targets)))
    made = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)
    assert (
        tracing.transformer_parameters(
            FLUX, SMALL, LoraSettings(rank=4, alpha=4.0, target_modules=targets)
        ).trained
        == made
    )


def allocated(work) -> int:
    """Most bytes at once that the CPU's allocator gave out while `work` ran, by PyTorch's profiler.

    On one thread: with more, convolutions take a copy of their input as a workspace of their own.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            work()
    finally:
        torch.set_num_threads(threads)
    events = sorted(
        (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    alive = peak = 0
    for event in events:
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


@pytest.mark.pipeline
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("training", [False, True])
@SMALLS
def test_memory_is_what_a_small_model_really_takes(base, small, training, checkpointing):
    """The profiler's peak on real tensors, beside that of the trace without data."""
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
    traced = cost.traced_cost(base, small, call).bytes
    assert traced == pytest.approx(allocated(work), rel=0.1)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "lora, training, checkpointing",
    [(None, False, False), (None, True, True), (LORA, True, False), (LORA, True, True)],
    ids=["forward", "whole, checkpointing", "LoRA", "LoRA, checkpointing"],
)
@pytest.mark.parametrize(
    "base, deep",
    [
        (FLUX, SMALL | {"num_layers": 4, "num_single_layers": 5}),
        (FLUX2, SMALL_FLUX2 | {"num_layers": 4, "num_single_layers": 5}),
        (ZIMAGE, SMALL_ZIMAGE | {"n_layers": 5}),
        (QWEN, SMALL_QWEN | {"num_layers": 6}),
        (SD3, SMALL_SD3 | {"num_layers": 7, "dual_attention_layers": (0, 1, 2)}),
        (SD3, SMALL_SD3 | {"num_layers": 5, "dual_attention_layers": ()}),
    ],
    ids=["flux", "flux2", "zimage", "qwen_image", "sd3", "sd3 without a second attention"],
)
def test_shallow_models_tell_the_cost_of_a_deep_one(base, deep, training, checkpointing, lora):
    call = cost.Call(2, 128, 64, torch.bfloat16, training, lora, checkpointing)
    extrapolated, traced = (
        cost.transformer_cost(base, deep, call),
        cost.traced_cost(base, deep, call),
    )
    assert extrapolated.flops == traced.flops
    assert extrapolated.bytes == pytest.approx(traced.bytes, rel=0.03)


def test_operations_are_those_of_the_matrix_products():
    """Two for every weight and token, and attention's two products; modulation is less."""
    tokens, width = 2025 + 512, 3072
    blocks = (
        (19 + 38) * 12 * width**2
    )  # attention's four and the MLP's eight widths, for the tokens of both streams
    attention = (19 + 38) * 4 * tokens**2 * width
    call = partial(cost.Call, 1, 2025, 512, torch.bfloat16)
    flops = lambda training: cost.transformer_cost(FLUX, TRANSFORMER, call(training)).flops
    forward = 2 * blocks * tokens + attention
    assert flops(False) == pytest.approx(forward, rel=0.02)
    assert flops(True) == pytest.approx(
        3 * forward + attention / 2, rel=0.02
    )  # flash attention makes its scores again on its way back


def test_autocast_has_cudas_rules():
    with cost.as_on_cuda(torch.bfloat16):
        x = torch.randn(2, 8, dtype=torch.bfloat16)
        assert torch.nn.functional.layer_norm(x, (8,)).dtype == torch.float32
        assert torch.nn.functional.linear(x, torch.randn(4, 8)).dtype == torch.bfloat16


def test_decoding_is_what_a_small_vae_really_takes():
    shape = VAE | {"block_out_channels": (32, 64, 64, 64)}
    vae = AutoencoderKL(**shape)
    latents = torch.zeros(2, 16, 8, 8)
    with torch.no_grad():
        really = allocated(lambda: vae.decode(latents, return_dict=False))
    assert tracing.vae_cost(FLUX, tuple(shape.items()), 2, 64, 64).bytes == pytest.approx(
        really, rel=0.05
    )


@pytest.mark.pipeline
def test_an_average_of_the_weights_takes_four_bytes_of_each():
    plain, averaged = (
        make_plan(
            changed(load_profile(ROOT / "profiles" / "flux_hps.yaml"), "g2rpo", change),
            "g2rpo",
            Machines(16, 141, 2),
        )
        for change in ({}, {"ema": {"decay": 0.9}})
    )
    assert (
        averaged.memory_gib["ema"] == pytest.approx(plain.memory_gib["optimizer"] / 2, abs=1e-3)
        and not plain.memory_gib["ema"]
    )
    assert averaged.disk_gib["checkpoints"] == pytest.approx(
        plain.disk_gib["checkpoints"] * 4 / 3, abs=0.01
    )


def test_the_papers_setting():
    profile = load_profile(ROOT / "profiles" / "flux_hps_clip.yaml")
    made = make_plan(profile, "g2rpo", Machines(16, 141, nodes=2), shard=16)
    assert (
        made.fits
        and made.evaluations_per_prompt == 1700
        and made.evaluations_per_iteration == 27_200
    )
    weights = 11_901_408_320 * 4 / 16 / 2**30
    assert made.memory_gib["weights"] == pytest.approx(weights, abs=0.001)
    assert made.memory_gib["optimizer"] == pytest.approx(2 * weights, abs=0.001)
    assert made.memory_total_gib == pytest.approx(sum(made.memory_gib.values()), abs=0.01)
    alone = make_plan(profile, "g2rpo", Machines(1, 80))
    assert not alone.fits
    assert any(
        changed.fits and "LoRA" in change
        for change, changed, _ in changes(profile, "g2rpo", Machines(1, 80), fits=False)
    )
    groups = make_plan(profile, "g2rpo", Machines(16, 141, nodes=2))
    assert groups.memory_gib["weights"] == pytest.approx(2 * weights, abs=0.001)
    assert make_plan(profile, "g2rpo", Machines(16, 141, nodes=2), rate=Rate(ms=100.0)).seconds[
        "rollout"
    ] == pytest.approx(170.0)


@pytest.mark.pipeline
def test_a_window_that_moves_is_planned_over_all_its_positions():
    profile = load_profile(ROOT / "profiles" / "flux_hps_clip.yaml")
    made = make_plan(profile, "mix_grpo", Machines(16, 141, nodes=2))
    assert 12 * 4 < made.evaluations_per_prompt < 12 * 25 and made.evaluations_per_prompt != int(
        made.evaluations_per_prompt
    )


@pytest.mark.pipeline
def test_a_reward_on_the_host_takes_its_seconds_per_image(tmp_path):
    """OCR: each image of a rollout, over the images that are read at the same time."""
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    evaluated = load_profile(ROOT / "profiles" / "flux_hps_clip.yaml").evaluation.rewards

    def scoring(rewards: dict, trained_on: dict) -> float:
        file = tmp_path / "profiles" / "mine.yaml"
        evaluation = {"rewards": [*evaluated, *trained_on]}
        changed = {"training": {"rewards": trained_on}, "evaluation": evaluation}
        file.write_text(json.dumps({"extends": "flux_hps_clip", "rewards": rewards, **changed}))
        plan = make_plan(load_profile(file), "g2rpo", Machines(16, 141, nodes=2))
        assert "server" in rewards.get("ocr", {}) or "ocr" not in plan.not_counted
        return plan.seconds["scoring"]

    read = lambda **settings: scoring({"ocr": settings}, {"ocr": 1.0})
    elsewhere = read(server={"url": "http://127.0.0.1:1"})
    assert elsewhere == scoring({}, {})
    images = 8 * 3 * 12  # of a prompt, on each GPU: steps, granularities, members
    assert read(threads=4) - elsewhere == pytest.approx(images * SECONDS[True] / 4, rel=0.01)
    assert read(threads=8) - elsewhere == pytest.approx(images * SECONDS[True] / 8, rel=0.01)
    assert read(detect=False) - elsewhere < images * SECONDS[True] / 100


def test_what_does_not_fit_gets_changes_that_the_prompts_allow():
    """16 prompts an iteration are not for 32 GPUs, so none of the changes asks for as many."""
    profile = load_profile(ROOT / "profiles" / "flux_hps.yaml")
    planned = changes(profile, "g2rpo", Machines(16, 40, nodes=2), fits=False)
    assert any(plan.fits for _, plan, _ in planned) and not any(
        "32" in change and "GPUs" in change for change, *_ in planned
    )


def test_what_processes_send_is_what_rings_send():
    """Two processes with half of the weights each: an update gathers twice and sums once."""
    counts = tracing.Parameters(all=100, trained=100, block=10, rest=5)
    calls = {
        "width": 2,
        "rollout_calls": 3,
        "updates": [4],
        "kl": False,
        "replica": False,
        "every_call": False,
    }
    one_node, two_nodes = (Machines(4, 80, nodes, inside=1e-9, between=1e-10) for nodes in (1, 2))
    gigabytes, seconds = machines.sent(machines.Sharding(one_node, 4), counts, **calls)
    assert gigabytes["rollout"] * 1e9 == seconds["rollout"] == 3 * 200 * 3 / 4
    assert gigabytes["update"] * 1e9 == 4 * 2 * 200 * 3 / 4 + 400 * 3 / 4
    pairs, slower = machines.sent(machines.Sharding(two_nodes, 2), counts, **calls)
    assert pairs["rollout"] * 1e9 == slower["rollout"] == 3 * 200 / 2  # inside a node
    assert slower["update"] == pytest.approx(
        4 * 2 * 200 / 2 + 400 / 2 + 10 * 2 * (400 / 2) / 2
    )  # its parts are summed between nodes
    assert machines.sent(machines.Sharding(Machines(1, 80), 1), counts, **calls) == ({}, {})


@pytest.mark.pipeline
def test_the_cheapest_way_fits_memory_and_hours_or_is_none():
    profile = load_profile(ROOT / "profiles" / "flux_lora_1gpu.yaml")
    way, fastest = cheapest(profile, "g2rpo", Machines(1, 80), hours=100.0)
    assert not make_plan(profile, "g2rpo", Machines(1, 24)).fits
    assert way.plan.fits and way.plan.hours <= 100 and fastest.plan.hours <= way.plan.hours
    found = list(ways(profile, "g2rpo", Machines(1, 80), lora=False))
    assert way.plan.gpu_hours == min(one.plan.gpu_hours for one in found)
    assert (
        profile.run("g2rpo").training.batch_tokens == 1
    )  # which no smaller call can be tried beside
    assert cheapest(profile, "g2rpo", Machines(1, 80), hours=fastest.plan.hours / 2) == (
        None,
        fastest,
    )
    assert cheapest(profile, "g2rpo", Machines(1, 8), hours=100.0) == (None, None)


@pytest.mark.pipeline
def test_the_command_speaks_to_machines_and_says_what_is_wrong(tmp_path):
    words = ("plan", "--profile", "flux_hps_clip", "--memory", "141", "--gpus", "16")
    made = json.loads(run_here(main, *words, "--json", folder=ROOT).stdout)
    parts = {"evaluations_per_prompt", "memory_gib", "fits", "seconds_per_iteration", "disk_gib"}
    assert parts <= made.keys()
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    (tmp_path / "params.yaml").write_text("profile: tiny\nmethods: [nft_shared]\nseeds: [1]\n")
    for wrong, message in (
        (["--gpus", "5"], "--gpus 5: 16 prompts per iteration cannot be shared evenly"),
        (["--rate", "fast"], "plan: --rate fast: give milliseconds per forward evaluation"),
        (["--nodes", "3"], "plan: --gpus 16 cannot be divided evenly over 3 nodes"),
        (["--hours", "0"], "plan: --hours 0.0 must be above 0"),
        (["--card", "v100"], "plan: --card v100: not one of h100"),
        (["--shard", "5"], "plan: --shard 5 must divide --gpus 16"),
        (["--campaign"], "methods: 'nft_shared' is not in the profile"),
    ):
        assert message in refusal(main, *words, *wrong, folder=tmp_path)


def test_a_rate_reaches_every_number_of_a_plan():
    profile = load_profile(ROOT / "profiles" / "flux_lora_8gpu.yaml")
    usual, slow = Rate(), Rate(tflops=100.0)
    fast, late = (make_plan(profile, "g2rpo", Machines(4, 79), rate=rate) for rate in (usual, slow))
    computed = lambda plan: sum(plan.seconds.values())
    assert (
        computed(late) == pytest.approx(4 * computed(fast), rel=1e-3)
        and late.memory_gib == fast.memory_gib
    )
    for what in ("evaluation_hours", "monitor_hours"):
        assert getattr(late, what) == pytest.approx(4 * getattr(fast, what), abs=0.02)
    by_rate = [
        changes(profile, "g2rpo", Machines(4, 79), True, None, rate) for rate in (usual, slow)
    ]
    for (label, before, _), (same, after, _) in zip(*by_rate):
        assert label == same and after.gpu_hours > 3 * before.gpu_hours, label
    cheap, _ = cheapest(profile, "g2rpo", Machines(4, 79), 1000.0, slow)
    assert (
        cheap.plan.gpu_hours
        > 3 * cheapest(profile, "g2rpo", Machines(4, 79), 1000.0)[0].plan.gpu_hours
    )


def test_cards_have_memory_a_rate_and_a_source():
    for name, card in CARDS.items():
        rate = rate_of(name, compile=False)
        assert (
            0 < card.share < 1
            and rate.tflops == card.share * card.peak
            and rate.source.startswith(f"{name}: ")
        )
        assert card.source in rate.source and card_of(name.upper()) is card
    assert rate_of("h100", compile=True).tflops == pytest.approx(564, rel=0.01)  # as measured
    assert rate_of("h100", compile=False).tflops == pytest.approx(354, rel=0.01)
    assert (
        "compiled" in rate_of("h100", True).source
        and "compiled" not in rate_of("4090", True).source.split(";")[0]
    )


def test_a_small_flux_is_planned_and_what_a_cpu_trains_is_not():
    made = make_plan(
        load_profile(ROOT / "profiles" / "small_gpu.yaml"),
        "g2rpo",
        Machines(1, 23),
        rate=rate_of("4090", True),
    )
    assert (
        made.fits
        and made.evaluations_per_iteration == 27200
        and made.not_counted == ["hps", "clip_score", "verifier"]
    )
    assert made.memory_gib["weights"] == pytest.approx(
        4 * 32.395680e6 / 2**30, abs=1e-3
    )  # as it was built on the card
    for name in ("tiny", "tiny_sd3"):
        with refused("builds its own small models, for a CPU"):
            make_plan(load_profile(ROOT / "profiles" / f"{name}.yaml"), "g2rpo", Machines(1, 80))


def test_checkpoints_take_little_of_a_runs_time():
    """At most a tenth, if nothing were computed meanwhile."""
    profile = load_profile(ROOT / "profiles" / "flux_hps_clip.yaml")
    for name in ("g2rpo", "g2rpo_coarse"):
        plan = make_plan(profile, name, Machines(16, 141, 2))
        assert (
            plan.checkpoints == 1 + int(plan.hours * 2) and plan.saving_hours < 0.1 * plan.hours
        ), name


def test_the_disk_counts_what_dvc_copies_and_the_hours_an_evaluation():
    profile = load_profile(ROOT / "profiles" / "flux_hps_clip.yaml")
    plan = make_plan(profile, "g2rpo", Machines(8, 141))
    half = make_plan(
        changed(profile, "g2rpo", {"save_dtype": "bfloat16"}), "g2rpo", Machines(8, 141)
    ).disk_gib
    assert half["trained"] == pytest.approx(plan.disk_gib["trained"] / 2, abs=0.01)
    assert half["checkpoints"] == plan.disk_gib["checkpoints"]
    assert plan.disk_gib["copies"] == pytest.approx(
        plan.disk_gib["embeddings"] + plan.disk_gib["trained"], abs=0.01
    )
    assert 0.15 < plan.evaluation_hours < 0.3  # 26,400 calls of 0.235 s on 8 GPUs


@pytest.mark.pipeline
def test_a_campaign_has_every_run_and_evaluation_and_its_price():
    """By the committed params.yaml, for FLUX.1-dev."""
    words = [
        "plan",
        "--profile",
        "flux_hps_clip",
        "--campaign",
        "--gpus",
        "16",
        "--memory",
        "139",
        "--price",
        "2.5",
    ]
    done = run_here(main, *words, "--json", folder=ROOT)
    made = json.loads(done.stdout)
    entries = {entry["name"]: entry for entry in made["entries"]}
    assert list(entries) == ["base-0", "g2rpo-1", "g2rpo-2", "dance_grpo-1", "dance_grpo-2"]
    assert list(entries["base-0"]["hours"]) == ["evaluation"] and all(
        entry["fits"] for entry in entries.values()
    )
    assert made["gpu_hours"] == pytest.approx(
        sum(entry["gpu_hours"] for entry in entries.values()), abs=1
    )
    plan = make_plan(
        load_profile(ROOT / "profiles" / "flux_hps_clip.yaml"), "g2rpo", Machines(16, 139, 2)
    )
    hours = {
        "iterations": plan.hours,
        "monitor": plan.monitor_hours,
        "checkpoints": plan.saving_hours,
        "evaluation": plan.evaluation_hours,
    }
    assert entries["g2rpo-1"]["hours"] == hours
    calls = 13 * 32 * 16  # measurements, prompts, steps
    assert (
        plan.monitor_hours == pytest.approx(calls * plan.ms_per_evaluation / 3.6e6 / 16, abs=0.006)
        and plan.monitor_hours > 0
    )
    assert made["disk_gib"]["runs"] == pytest.approx(
        8 * plan.disk_gib["trained"], rel=0.01
    )  # four runs, and DVC's copies
    said = run_here(main, *words, folder=ROOT).stdout
    assert (
        f"{made['gpu_hours']:,.0f} GPU-hours, {2.5 * made['gpu_hours']:,.0f} at 2.5 an hour"
        in said.splitlines()[-2]
    )


@pytest.mark.pipeline
def test_a_campaign_counts_the_base_once_for_each_guidance_of_its_runs(tmp_path):
    """Without guidance an evaluation takes half the forward evaluations."""
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    words = ["plan", "--campaign", "--gpus", "8", "--memory", "79", "--json"]

    def hours(*methods: str) -> dict[str, float]:
        named = (
            f"profile: sd35_medium_hps_clip\nmethods: [{', '.join(methods)}]\nseeds: [1]\n"
            "published: []\n"
        )
        (tmp_path / "params.yaml").write_text(named)
        done = run_here(main, *words, folder=tmp_path)
        return {
            entry["name"]: entry["hours"]["evaluation"]
            for entry in json.loads(done.stdout)["entries"]
        }

    both = hours("g2rpo", "diffusion_nft", "awm")
    assert both["diffusion_nft-1"] == both["awm-1"] == pytest.approx(both["g2rpo-1"] / 2, abs=0.01)
    assert both["base-0"] == pytest.approx(both["g2rpo-1"] + both["awm-1"], abs=0.01)
    assert hours("g2rpo")["base-0"] == both["g2rpo-1"] and hours("awm")["base-0"] == both["awm-1"]


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "name, less",
    [
        ("qwen_image_lora_1gpu", True),
        ("zimage_lora_1gpu", True),
        ("flux2_klein_4b_lora_1gpu", False),
    ],
)
def test_time_is_that_of_prompts_of_usual_length_where_padding_is_left_out(name, less):
    """Memory is still that of the longest prompt which the profile lets in."""
    profile, machines = load_profile(ROOT / "profiles" / f"{name}.yaml"), Machines(1, 79)
    made, work = make_plan(profile, "g2rpo", machines), Work(profile, "g2rpo", machines, None)
    assert made.most_prompt_tokens == 512 and made.prompt_tokens == (PROMPT_TOKENS if less else 512)
    share = work.flops(training=False) / work.cost(1, training=False).flops
    assert 0.6 < share < 0.8 if less else share == 1
    short = make_plan(
        profile.changed(
            embed=profile.embed.model_copy(update={"max_sequence_length": PROMPT_TOKENS})
        ),
        "g2rpo",
        machines,
    )
    assert (
        short.seconds_per_iteration == pytest.approx(made.seconds_per_iteration, rel=0.01)
        or not less
    )
    assert short.memory_total_gib <= made.memory_total_gib
