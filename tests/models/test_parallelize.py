"""One, two and four processes, sharded by FSDP2 over gloo, compute the same."""

import json
from functools import partial

import pytest
import torch
from diffusers import FluxTransformer2DModel

from g2rpo_core.models.loading import apply_compile
from tests.fixtures.commands import run_module
from tests.fixtures.killed import BFLOAT16, HYBRID, LORA, NOISED, WHOLE

SIZES = [(WHOLE, 1), (WHOLE, 2), (HYBRID, 4)]
SIZES += [(mode, size) for mode in (LORA, NOISED) for size in (1, 2)]
RUNS = [*SIZES, *((mode + BFLOAT16, size) for mode in (WHOLE, LORA) for size in (1, 2))]


@pytest.fixture(scope="module")
def ends(models, embeddings_folder, tmp_path_factory):
    """What the first process of each run ends with, by what is trained and the processes."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "models").symlink_to(models)
    (folder / "embeddings").symlink_to(embeddings_folder)
    runs = [f"{mode}-{size}" for mode, size in RUNS]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    done = run_module("tests.fixtures.killed", folder, *runs, **settings)
    assert done.returncode == 0, done.stderr[-2000:]
    log = json.loads(done.stdout.splitlines()[-1])
    failed = [(run, each["ended"]) for run, each in zip(runs, log) if each["ended"] != [0]]
    assert not failed, done.stderr[-2000:]
    ends = {
        (mode, size): torch.load(folder / f"end-{mode}-{size}-0.pt", weights_only=True)
        for mode, size in RUNS
    }
    for mode, size in RUNS:
        if not mode.startswith(LORA):
            ends[mode, size]["saved"] = FluxTransformer2DModel.from_pretrained(
                folder / f"saved-{mode}-{size}" / "transformer"
            ).state_dict()
    return ends


@pytest.mark.pipeline
@pytest.mark.parametrize("mode, size", [(mode, size) for mode, size in SIZES if size > 1])
def test_process_groups_of_any_size_compute_the_same(ends, mode, size):
    alone, many = ends[mode if mode in (LORA, NOISED) else WHOLE, 1], ends[mode, size]
    for record, other in zip(alone["records"], many["records"], strict=True):
        # The last two count single weights and ratios, which are at the edge of rounding
        apart = {"seconds", "old_policy_ratio_error", "clip_ratio", "rounded_share"}
        for key in record.keys() - apart:
            assert other[key] == pytest.approx(record[key], rel=1e-3, abs=2e-6), key
    assert alone["gradients"]
    for gradient, other in zip(alone["gradients"], many["gradients"], strict=True):
        torch.testing.assert_close(
            other, gradient, rtol=1e-2, atol=1e-3 * float(gradient.abs().max() + 1e-6)
        )
    # Adam's first steps are signs: where a gradient is rounding alone, so is its step
    one, other = (torch.cat([each.flatten() for each in end["weights"]]) for end in (alone, many))
    assert (one - other).abs().mean() < 1e-6
    torch.testing.assert_close(alone["images"], many["images"], rtol=1e-3, atol=1e-4)


@pytest.mark.pipeline
@pytest.mark.parametrize("mode", [WHOLE, LORA])
def test_two_processes_compute_the_same_in_bfloat16_to_its_rounding(ends, mode):
    alone, many = ends[mode + BFLOAT16, 1], ends[mode + BFLOAT16, 2]
    for record, other in zip(alone["records"], many["records"], strict=True):
        for key in record.keys() - {
            "seconds",
            "old_policy_ratio_error",
            "clip_ratio",
            "loss",
            "kl",
        }:
            assert other[key] == pytest.approx(record[key], rel=0.05, abs=1e-2), key
    torch.testing.assert_close(alone["images"], many["images"], rtol=0, atol=0.05)


@pytest.mark.pipeline
@pytest.mark.parametrize("mode, size", [(WHOLE, 2), (HYBRID, 4), (WHOLE + BFLOAT16, 2)])
def test_what_is_saved_after_a_forward_without_gradients_are_the_masters(ends, mode, size):
    """FSDP2 leaves the root module's weights gathered, in the dtype of the computation."""
    end = ends[mode, size]
    assert {value.dtype for value in end["saved"].values()} == {torch.float32}
    assert all(
        torch.equal(one, other)
        for one, other in zip(end["weights"], end["saved"].values(), strict=True)
    )
    assert any(not torch.equal(one, one.bfloat16().float()) for one in end["saved"].values())


@pytest.mark.pipeline
def test_compiled_blocks_compute_the_same_without_a_break_in_their_graphs(policy, monkeypatch):
    """Traced and differentiated by the compiler; writing machine code takes minutes here."""
    transformer = FluxTransformer2DModel.from_config(
        {**policy.transformer.config, "num_layers": 1, "num_single_layers": 1}
    )
    transformer.load_state_dict(policy.transformer.state_dict(), strict=False)

    def outputs() -> list[torch.Tensor]:
        tensors = []
        for batch in (2, 5):
            inputs = policy.architecture.inputs(transformer.config, batch, 16, 8, "cpu")
            inputs["hidden_states"] = torch.linspace(-1, 1, batch * 16 * 32).view(batch, 16, 32)
            transformer.zero_grad()
            velocity = transformer(**inputs)[0]
            velocity.square().mean().backward()
            tensors += [velocity, *(p.grad.clone() for p in transformer.parameters())]
        return tensors

    plain = outputs()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.utils.counters.clear()
    apply_compile(policy.architecture.blocks(transformer))
    for compiled, eager in zip(outputs(), plain, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-6)
    counters = torch._dynamo.utils.counters
    assert counters["frames"]["ok"] >= 2 and not counters["graph_break"]
