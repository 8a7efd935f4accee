import json

import pytest
import torch

from g2rpo_core.algorithm.batch import Draws
from g2rpo_core.algorithm.methods import METHODS
from g2rpo_core.cli.main import main
from g2rpo_core.config.profile import ResolvedRun
from g2rpo_core.data.prompts import prompt_order
from g2rpo_core.inference.gradients import (
    Gradients,
    probe_method,
    probe_steps,
    project,
    signal_to_noise,
)
from tests.fixtures.commands import refusal, run_here
from tests.fixtures.projects import small_project
from tests.fixtures.rollouts import redness

STEPS, TAILS = (0, 2), (1, 3)


def noise(images: torch.Tensor, prompts: list[str] | None) -> torch.Tensor:
    """A reward that knows nothing: random, and seeded by the image's own pixels."""
    keys = (images.double().sum((1, 2, 3)) * 1e6).long()
    return torch.stack(
        [torch.rand((), generator=torch.Generator().manual_seed(int(key))) for key in keys]
    )


def entry(settings, method=None, **rewards) -> ResolvedRun:
    sampling, training = settings
    training = training.model_copy(
        update={
            "num_generations": 4,
            "prompts_per_iteration": 1,
            "rewards": rewards or {"redness": 1.0},
        }
    )
    method = method or METHODS["g2rpo"].changed(tree={"sde_steps": STEPS, "granularities": TAILS})
    return ResolvedRun(method, sampling, training, "mine", None, "g2rpo")


@pytest.fixture
def make(policy, embeddings, settings):
    """make(method, size, judge, seed, **rewards) -> Gradients of the tiny policy."""
    known = {"redness": redness, "noise": noise}

    def made(method=None, size=4096, judge=None, seed=0, **rewards) -> Gradients:
        run = entry(settings, method, **rewards)
        named = dict.fromkeys([*run.training.rewards, *([judge] if judge else [])])
        return Gradients(
            policy, run, embeddings, {name: known[name] for name in named}, judge, seed, size
        )

    return made


def test_a_gradient_is_that_of_trainings_first_iteration(make, make_trainer):
    """To the last bit."""
    method = METHODS["g2rpo"].changed(
        tree={"sde_steps": STEPS, "granularities": TAILS},
        objective={"updates_per_rollout": "iteration"},
    )
    seed = next(seed for seed in range(999) if prompt_order(0, 1, 24, seed)[0] == 0)
    trainer = make_trainer(
        method,
        seed=seed,
        num_generations=4,
        prompts_per_iteration=1,
        max_grad_norm=1e12,
        learning_rate=0.0,
    )
    kept = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: kept.append(torch.cat([each.grad.flatten() for each in trainer.parameters]))
    )
    trainer.iterate(0)
    gradients = make(method, size=None, seed=seed)
    conditioning, sampled, scores, gains = gradients.sample(0, 0)
    advantages = gradients.own.advantages(sampled, scores, gains)
    updates = gradients.trainer.updates(conditioning, sampled, advantages, Draws(seed, 0, range(1)))
    assert torch.equal(gradients.of(conditioning, updates), kept[0]) and kept[0].norm() > 0


def test_projected_gradients_say_what_whole_ones_say(make, policy):
    before = [each.detach().clone() for each in policy.trained_parameters().values()]
    sets = [(1,), (3,), TAILS]
    whole, projected = (
        probe_steps(make(size=size, judge="noise"), range(5), sets) for size in (None, 4096)
    )
    assert [(each.step, each.granularities) for each in whole] == [
        (step, tails) for step in STEPS for tails in sets
    ]
    for one, other in zip(whole, projected):
        assert other.snr2 == pytest.approx(one.snr2, abs=0.15) and other.error == pytest.approx(
            one.error, abs=0.15
        )
        assert other.cosine == pytest.approx(one.cosine, abs=0.1)
        assert (one.evaluations, one.compute) == (other.evaluations, other.compute)
    assert len({each.snr2 for each in whole}) == len(whole)
    assert all(
        torch.equal(each, old) for each, old in zip(policy.trained_parameters().values(), before)
    )
    # Costs: one step with one tail of six steps, two tails, and the state that trains
    first, _, both = whole[:3]
    assert (
        first.evaluations == both.evaluations == 1 + 4 * 5
    )  # the coarse tail is on the way of the fine one
    assert (
        first.compute == first.evaluations + 3 + 4 / 2
        and both.compute == both.evaluations + 3 + 8 / 2
    )


def test_prompts_that_agree_wholly_have_all_the_signal_there_is(make):
    """One prompt and noise four times: no product of two gradients is noise."""
    for each in probe_steps(make(), [7] * 4, [(1,), TAILS]):
        assert (each.snr2, each.error) == pytest.approx((3, 0), abs=1e-6) and each.cosine is None


def test_random_rewards_have_no_signal(make):
    """And the same reward as judge points exactly where the trained one does."""
    found = probe_steps(make(judge="noise", noise=1.0), range(12), [(1,)])
    for each in found:
        assert abs(each.snr2) < 4 * each.error and abs(each.snr2) < 1.0
        assert each.cosine == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", ["mix_grpo", "dance_grpo", "nft_shared"])
def test_a_whole_method_is_measured_by_its_own_rollout(make, name):
    method = (
        METHODS[name].changed(tree={"sde_steps": (0, 1, 2), "window": None})
        if name == "mix_grpo"
        else METHODS[name]
    )
    one, again = (probe_method(make(method, judge="redness"), range(3)) for _ in range(2))
    assert one == again  # every bit
    assert (
        one.step is None
        and one.cosine == pytest.approx(1, abs=1e-6)
        and one.compute > one.evaluations > 0
    )
    assert one.per_evaluation == pytest.approx(one.snr2 / (3 * one.evaluations))


def test_a_methods_evaluations_are_the_mean_of_what_was_sampled(make):
    """MixGRPO's window moves towards the image: later iterations share more steps."""
    gradients = make(
        METHODS["mix_grpo"].changed(
            tree={"window": {"size": 2, "every": 1, "order": "progressive"}}
        )
    )
    counted, sample = [], gradients.sample
    gradients.sample = lambda *asked: counted.append(sample(*asked)) or counted[-1]
    found = probe_method(gradients, range(3))
    of_each = [sampled.num_forward_evals for _, sampled, _, _ in counted]
    assert len(set(of_each)) > 1 and found.evaluations == pytest.approx(sum(of_each) / 3)


def test_a_projection_keeps_products_on_average_and_repeats():
    draw = torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, 30_000, generator=draw) + 0.2 for _ in range(2))
    exact = float((first * second).sum())
    found = [float(project(first, 512, seed) @ project(second, 512, seed)) for seed in range(200)]
    spread = torch.tensor(found).std() / 200**0.5
    assert sum(found) / 200 == pytest.approx(exact, abs=4 * float(spread)) and spread < 0.1 * exact
    assert torch.equal(project(first, 512, 3), project(first, 512, 3)) and not torch.equal(
        project(first, 512, 3), project(first, 512, 4)
    )


def test_the_signal_of_known_gradients_and_its_error():
    """Mean m, noise of variance s^2, D numbers: (P - 1) |m|^2 / (|m|^2 + D s^2) for P gradients."""
    draw = torch.Generator().manual_seed(0)
    mean, errors, found = torch.full((50,), 0.3), [], []
    for _ in range(300):
        value, error = signal_to_noise(mean + torch.randn(20, 50, generator=draw))
        found.append(value)
        errors.append(error)
    assert sum(found) / 300 == pytest.approx(19 * 4.5 / 54.5, rel=0.05)
    assert sum(errors) / 300 == pytest.approx(float(torch.tensor(found).std()), rel=0.25)
    assert signal_to_noise(torch.zeros(4, 5)) == (0.0, 0.0)


ASKED = "--prompts 3 --group 3 --steps 2,4 --granularities 1,3 --judge verifier"
WORDS = ["probe", "--gradients", *ASKED.split()]


@pytest.fixture
def built(tmp_path, models, embeddings_folder):
    """A checkout of profile tiny with models, embeddings and two runs."""
    small_project(tmp_path, models)
    (tmp_path / "embeddings" / "tiny").mkdir(parents=True)
    (tmp_path / "embeddings" / "tiny" / "train").symlink_to(embeddings_folder)
    return tmp_path


def assert_refused(folder, change: list[str], complaint: str) -> None:
    """The command ends in one line that says so."""
    assert complaint in refusal(main, *WORDS, *change, folder=folder)


def test_the_command_prints_every_step_and_refuses_what_it_cannot_do(built):
    lines = run_here(main, *WORDS, "--methods", "mix_grpo", folder=built).stdout.splitlines()
    shown = [(step, tails) for step in ("2", "4") for tails in ("1", "3", "1,3")]
    assert [line.split()[:3] for line in lines[2:-1]] == [["step", *both] for both in shown]
    assert (
        lines[-1].split()[:2] == ["mix_grpo", "1"] and lines[-1].split()[4] == "24"
    )  # the mean of 28, 24 and 20: the window moves
    of_run = run_here(main, *WORDS, "--run", "g2rpo-2", "--json", folder=built)  # a LoRA
    rows = json.loads(of_run.stdout)
    assert [row["step"] for row in rows] == [2, 2, 2, 4, 4, 4] and all(
        row["prompts"] == 3 for row in rows
    )
    for change, complaint in (
        (["--prompts", "2"], "give at least 3"),
        (["--steps", "9"], "from 0 to 8"),
        (["--methods", "x"], "has only"),
    ):
        assert_refused(built, change, complaint)


def test_a_base_of_a_study_is_probed_with_its_own_entries_and_models(built):
    """The profile's models become those of the base, so the numbers are the profile's."""
    lines = run_here(main, *WORDS, "--methods", "mix_grpo", folder=built).stdout.splitlines()
    base = built / "studies" / "mine" / "base-3"
    base.mkdir(parents=True)
    entries = (
        "entries: {mine: {method: mix_grpo, label: Mine, settings: {tree: {granularities: [1]}}}}"
    )
    head = (
        "study: mine\nprofile: tiny\nseeds: [1]\nbases: [1, 2, 3]\ntitle: A\nabout: B\n"
        "equal: [iterations]\nmethods: [mine]\n"
    )
    (base.parent / "params.yaml").write_text(head + entries)
    for kind in ("models", "embeddings"):
        (built / kind / "tiny").rename(base / kind)
    of_base = run_here(
        main, *WORDS, "--methods", "mine", "--study", "mine/base-3", folder=built
    ).stdout.splitlines()
    assert of_base[0].startswith("mine/base-3, base: ") and of_base[2:-1] == lines[2:-1]
    assert of_base[-1].split() == ["mine", *lines[-1].split()[1:]]
    for change, complaint in (
        (["--study", "mine/base-3", "--run", "g2rpo-2"], "only its base"),
        (["--study", "mine/base-4"], "there is no 4, only 1, 2, 3"),
        (["--study", "mine", "--profile", "tiny"], "give one of the two"),
    ):
        assert_refused(built, change, complaint)
