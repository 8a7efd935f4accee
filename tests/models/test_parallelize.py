"""One, two and four processes, sharded by FSDP2 over gloo, compute the same."""

import json
from functools import partial

import pytest
import torch
from diffusers import FluxTransformer2DModel

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models import loading
from g2rpo_core.models.policy import Policy
from g2rpo_core.models.settings import LoraSettings, ParallelSettings
from g2rpo_core.training.metrics import HeldOut
from g2rpo_core.training.trainer import Trainer
from tests.fixtures.commands import run_module
from tests.fixtures.killed import BFLOAT16, HYBRID, LORA, NOISED, WHOLE
from tests.fixtures.rollouts import redness, small_method

SIZES = [(WHOLE, 1), (WHOLE, 2), (HYBRID, 4)]
SIZES += [(mode, size) for mode in (LORA, NOISED) for size in (1, 2)]
RUNS = [*SIZES, (WHOLE + BFLOAT16, 2)]


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
def test_compiled_blocks_compute_the_same_in_few_graphs_and_none_runs_uncompiled(
    models, embeddings, make_trainer, monkeypatch
):
    """Monitor, rollout and update share the code of a kind of block, for which torch has a limit.

    Traced alone: writing machine code takes minutes here.
    """
    called, graphs, compiled_calls = [], [], []
    call = loading._call_compiled
    monkeypatch.setattr(
        loading, "_call_compiled", lambda *given, **named: called.append(1) or call(*given, **named)
    )

    def counted(graph, _):
        graphs.append(graph)
        return lambda *arguments: compiled_calls.append(1) or graph(*arguments)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    torch._dynamo.reset()

    def run(compiled: bool) -> tuple[Trainer, list[dict]]:
        size = {"height": 32, "width": 32, "guidance": 3.5}
        parallel = ParallelSettings(compile=compiled)
        lora = LoraSettings(rank=2, alpha=4)
        policy = Policy.load_to_train(models / "pipeline", lora, 0, parallel, **size)
        method = small_method("g2rpo", objective={"kl_coef": 0.01})
        trainer = make_trainer(method, policy=policy, prompts_per_iteration=1, iterations=1)
        measured = HeldOut(policy, embeddings, {"redness": redness}, 8, trainer.sampling)()
        return trainer, [measured, *trainer.run()]

    (trainer, records), (_, plain) = run(True), run(False)
    for record, other in zip(records, plain, strict=True):
        for key in record.keys() & {"heldout_redness", "reward_redness", "loss", "grad_norm", "kl"}:
            assert record[key] == pytest.approx(other[key], rel=1e-3, abs=1e-6), key
    # Two kinds of block: with and without gradients, of one and of several; the LoRA at zero
    assert len(graphs) <= 2 * 7 and len(compiled_calls) == len(called) > 40
    assert not torch._dynamo.utils.counters["graph_break"]
    # What torch says in its own log alone
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    torch._dynamo.reset()
    with pytest.raises(UserError, match="parallel.compile: a block needs more than 64 graphs"):
        list(trainer.run())
    monkeypatch.setattr(torch._dynamo.config, "disable", True)
    with pytest.raises(UserError, match="unset TORCH_COMPILE_DISABLE"):
        loading.apply_compile([])
