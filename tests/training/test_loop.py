"""Numbers that stop a run, and the checkpoint that comes to the same state again."""

import itertools
import json
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.distributed import checkpoint
from g2rpo_core.distributed.launcher import Terminated
from g2rpo_core.models.policy import Policy, snapshot
from g2rpo_core.models.settings import LoraSettings
from g2rpo_core.training.experience import NonFiniteError
from g2rpo_core.training.loop import CURVE, finish, train
from g2rpo_core.training.settings import CheckpointSettings, MonitorSettings
from tests.fixtures.rollouts import redness, small_method


def breaks(policy):
    """A reward that is no number once the policy has moved."""
    first = policy.transformer.proj_out.weight.clone()

    def reward(images, prompts):
        moved = not torch.equal(policy.transformer.proj_out.weight, first)
        return torch.full((len(images),), float("nan")) if moved else redness(images, prompts)

    return reward


def test_a_number_that_stops_a_run_is_named_and_comes_again(make_trainer, policy, tmp_path):
    broken = breaks(policy)

    messages = []
    for _ in range(2):
        trainer = make_trainer(small_method("g2rpo"), reward=broken)
        with pytest.raises(
            NonFiniteError, match="iteration 2: reward redness is nan for the prompt 'a "
        ) as caught:
            train(trainer, tmp_path, dict, lambda record: None)
        messages.append(str(caught.value))
        assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["iteration-000001"]
        curve = [
            json.loads(line) for line in (tmp_path / CURVE).read_text().splitlines()
        ]  # also of a run that was stopped
        assert [record["iteration"] for record in curve] == [0, 1] and curve[1][
            "reward_redness"
        ] == pytest.approx(0, abs=1)
    assert messages[0] == messages[1] and str(tmp_path) in messages[0]


def test_an_old_policy_ratio_that_is_not_one_stops_before_the_update(make_trainer, policy):
    """Weights that move while scoring make two policies of one."""
    weight, moved = policy.transformer.proj_out.weight, []

    def moving(images, prompts):
        with torch.no_grad():
            weight.mul_(1.01)
        moved.append(weight.clone())
        return redness(images, prompts)

    trainer = make_trainer(small_method("g2rpo"), reward=moving, max_old_policy_ratio_error=1e-4)
    message = (
        r"iteration 1: \|ratio - 1\| is .* over 1e-08 \(.*max_old_policy_ratio_error clip ranges\)"
    )
    with pytest.raises(NonFiniteError, match=message):
        list(trainer.run())
    # scored once a prompt and a group again, never updated
    assert len(moved) == trainer.training.prompts_per_iteration + 1
    assert torch.equal(moved[-1], weight)


def test_latents_that_are_no_numbers_stop_a_run(make_trainer, policy):
    with torch.no_grad():
        policy.transformer.proj_out.weight[0, 0] = float("nan")
    with pytest.raises(
        NonFiniteError, match="iteration 1: latents are not finite for the prompt 'a "
    ):
        list(make_trainer(small_method("g2rpo")).run())


@pytest.mark.parametrize("how, kept", [({"every": 2}, [2, 4, 5]), ({"minutes": 1}, [3, 5])])
def test_checkpoints_are_written_every_so_many_iterations_or_minutes_and_at_the_end(
    make_trainer, tmp_path, monkeypatch, how, kept
):
    """Each look at the clock is 20 seconds later than the one before."""
    clock = itertools.count(0, 20)
    time = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("g2rpo_core.training.loop.time", time)
    settings = CheckpointSettings(**how, keep=10)
    trainer = make_trainer(small_method("g2rpo"), iterations=5, checkpoints=settings)
    train(trainer, tmp_path, dict, lambda record: None)
    names = [path.name for path in checkpoint.checkpoints(tmp_path)]
    assert names == [f"iteration-{number:06d}" for number in kept]


def test_a_run_stopped_after_its_first_iteration_keeps_the_optimizers_moments(
    make_trainer, policy, tmp_path
):
    """AdamW's second step depends on the moments of the first."""
    start = {name: value.clone() for name, value in policy.transformer.state_dict().items()}
    broken = breaks(policy)
    (tmp_path / "whole").mkdir()
    shown: list[int] = []
    train(
        make_trainer(small_method("g2rpo")),
        tmp_path / "whole",
        dict,
        lambda record: shown.append(record["iteration"]),
    )
    assert shown == [0, 1, 2]  # also where it begins
    whole = policy.transformer.proj_out.weight.clone()

    policy.transformer.load_state_dict(start)
    (tmp_path / "stopped").mkdir()
    with pytest.raises(NonFiniteError):
        train(
            make_trainer(small_method("g2rpo"), reward=broken),
            tmp_path / "stopped",
            dict,
            lambda record: None,
        )
    assert checkpoint.last_iteration(tmp_path / "stopped") == 1
    policy.transformer.load_state_dict(start)
    shown.clear()
    train(
        make_trainer(small_method("g2rpo")),
        tmp_path / "stopped",
        dict,
        lambda record: shown.append(record["iteration"]),
    )
    assert shown == [1, 2]
    assert torch.equal(policy.transformer.proj_out.weight, whole)


def test_a_run_resumes_where_weights_never_have_a_gradient(
    make_trainer, models, tmp_path, monkeypatch
):
    """As the last text weights of Qwen-Image, of which the optimizer has no state."""
    ends = []
    for stop in (None, 1):
        (folder := tmp_path / str(stop)).mkdir()
        for part in (stop, None) if stop else (None,):
            policy = Policy.load_to_train(
                models / "pipeline", None, height=32, width=32, guidance=3.5
            )
            policy.transformer.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
            monkeypatch.setattr(policy.architecture, "idle", lambda _: ("unused",))
            trainer = make_trainer(small_method("g2rpo"), policy=policy)
            asked = lambda record, part=part, term=trainer.termination: setattr(
                term, "requested", record["iteration"] == part
            )
            with pytest.raises(Terminated) if part else nullcontext():
                train(trainer, folder, dict, asked)
        ends.append(trainer.state())
    for part in ("weights", "moments"):
        assert ends[0][part].keys() == ends[1][part].keys()
        assert ("unused" in ends[0][part]) == (part == "weights")
    assert all(
        torch.equal(value, ends[1]["weights"][name]) for name, value in ends[0]["weights"].items()
    )
    assert torch.equal(ends[0]["weights"]["unused"], torch.ones(3))


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, alpha=4.0)])
def test_a_run_sampled_by_a_slow_policy_resumes_bit_for_bit(make_trainer, models, tmp_path, lora):
    """The slow policy is in the checkpoint."""
    slow = METHODS["diffusion_nft"].changed(
        objective={"old": {"ramp": 0.5, "hold": 0.9}, "times": 2, "updates_per_rollout": 2}
    )
    ends = []
    for stop in (None, 2):
        policy = Policy.load_to_train(models / "pipeline", lora, height=32, width=32, guidance=3.5)
        make = partial(
            make_trainer, slow, policy=policy, iterations=4, learning_rate=1e-3, lora=lora
        )
        (folder := tmp_path / str(stop)).mkdir()
        trainer = make()
        if stop:
            asked = lambda record, stop=stop, term=trainer.termination: setattr(
                term, "requested", record["iteration"] >= stop
            )
            with pytest.raises(Terminated):
                train(trainer, folder, dict, asked)
            trainer = make(
                policy=Policy.load_to_train(
                    models / "pipeline", lora, height=32, width=32, guidance=3.5
                )
            )
        records = train(trainer, folder, dict, lambda record: None)
        ends.append(
            (
                trainer.state(),
                [
                    {key: value for key, value in each.items() if key != "seconds"}
                    for each in records
                ],
            )
        )
    (whole, records), (resumed, others) = ends
    assert records == others and whole.keys() == {"weights", "moments", "old"}
    for part in ("weights", "old"):
        assert all(torch.equal(whole[part][name], resumed[part][name]) for name in whole[part])
    last = list(whole["weights"])[-1]
    assert (
        not torch.equal(whole["old"][last], whole["weights"][last])
        and records[-1]["old_deviation"] > 0
    )


@pytest.mark.parametrize(
    "lr_scheduler, computed", [("constant", [4, 5]), ("linear", [1, 2, 3, 4, 5])]
)
def test_a_finished_run_goes_on_to_a_later_end(
    make_trainer, policy, tmp_path, monkeypatch, capsys, lr_scheduler, computed
):
    """To the bits of one so long from the start, unless its learning rate depends on the end."""
    begin = {name: value.clone() for name, value in policy.transformer.state_dict().items()}
    seen: list[int] = []

    def run(home, iterations):
        home.mkdir(exist_ok=True)
        monkeypatch.chdir(home)
        policy.transformer.load_state_dict(begin)
        monitor = MonitorSettings(every=2, prompts=1, rewards=("redness",))
        trainer = make_trainer(
            small_method("g2rpo"),
            iterations=iterations,
            lr_scheduler=lr_scheduler,
            monitor=monitor,
            snapshots=(2,),
        )
        end = "training.iterations" if lr_scheduler == "constant" else None
        folder = checkpoint.scratch(
            "train", "p/g2rpo-1", {"training": trainer.training}, [], end=end
        )
        seen.clear()
        heldout = lambda: {"heldout_redness": policy.transformer.proj_out.weight.sum().item()}
        records = train(trainer, folder, heldout, lambda record: seen.append(record["iteration"]))
        finish(trainer, folder, records)
        assert any(snapshot(folder / "out", 2).rglob("*.safetensors"))
        checkpoint.release(folder)
        weights = {name: value.clone() for name, value in policy.transformer.state_dict().items()}
        return [
            {name: value for name, value in record.items() if not name.startswith("seconds")}
            for record in records
        ], weights

    straight = run(tmp_path / "straight", 5)
    run(tmp_path / "longer", 3)
    longer = run(tmp_path / "longer", 5)
    assert seen[1:] == computed
    assert longer[0] == straight[0] and all(
        torch.equal(longer[1][name], value) for name, value in straight[1].items()
    )
    said = capsys.readouterr().err
    assert (
        "goes on from " in said and "only training.iterations changed, from 3 to 5" in said
    ) == (lr_scheduler == "constant")
    assert [
        path.name
        for path in (tmp_path / "longer" / checkpoint.ROOT / "train" / "p" / "g2rpo-1").glob(
            "*/iteration-*"
        )
    ] == ["iteration-000005"]


def test_the_last_checkpoint_of_a_finished_run_stays_if_asked(make_trainer, tmp_path, monkeypatch):
    """Or by its size; it is the largest of what a run writes."""
    for asked, small, stays in (
        (True, 0, True),
        (False, 2**60, False),
        (None, 2**60, True),
        (None, 0, False),
    ):
        monkeypatch.setattr("g2rpo_core.training.loop.SMALL", small)
        trainer = make_trainer(
            small_method("g2rpo"), iterations=1, checkpoints=CheckpointSettings(finished=asked)
        )
        folder = tmp_path / f"{asked}-{small}"
        folder.mkdir()
        finish(trainer, folder, train(trainer, folder, dict, lambda record: None))
        assert len(checkpoint.checkpoints(folder)) == 1  # until DVC has the run
        checkpoint.release(folder)
        assert bool([*tmp_path.glob(f"{folder.name}.kept/iteration-*")]) == stays
        assert not folder.exists()
