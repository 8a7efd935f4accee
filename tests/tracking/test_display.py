"""A run as it is watched: progress bar, warnings and event files."""

import time
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from g2rpo_core.distributed.process_group import ProcessGroup
from g2rpo_core.tracking import display as tracking
from g2rpo_core.tracking.display import Display
from g2rpo_core.training.settings import SampleSettings, TrackingSettings
from tests.fixtures.errors import refused
from tests.fixtures.rollouts import small_method

RECORD = {
    "iteration": 2,
    "num_forward_evals": 600,
    "seconds": 3.0,
    "reward_redness": 0.25,
    "loss": 0.1,
}
RUN = Path(".cache", "live", "tiny", "g2rpo-1")


def record(iteration: int, reward: float) -> dict:
    about = {
        "iteration": iteration,
        "num_forward_evals": 10 * iteration,
        "seconds": 2.0 * iteration,
    }
    return about | {
        "reward_redness": reward,
        "heldout_hps": reward / 2,
        "kl": float("nan"),
        "grad_norm": 1.0,
    }


@pytest.fixture
def trainer(make_trainer):
    tracking = TrackingSettings(to=("tensorboard",), samples=SampleSettings(every=2, prompts=3))
    return make_trainer(small_method("g2rpo"), iterations=4, tracking=tracking)


@pytest.fixture
def track(make_trainer, embeddings, here):
    """Watches a run without images: records of each iteration and reward, up to its end."""
    trainer = make_trainer(small_method("g2rpo"), tracking=TrackingSettings(samples=None))

    def run(told: Iterable[tuple[int, float]], first: int = 0) -> EventAccumulator:
        display = Display("tiny/g2rpo-1", trainer, embeddings, first)
        for iteration, reward in told:
            display.record(record(iteration, reward))
        display.finish()
        return EventAccumulator(str(RUN)).Reload()

    return run


def test_every_finite_column_is_a_curve_with_speed_and_memory(track):
    events = track([(0, 0.0), (1, 0.1), (2, 0.2)])
    curve = lambda name: [(event.step, round(event.value, 6)) for event in events.Scalars(name)]
    assert "training/kl" not in events.Tags()["scalars"]  # it was no number
    assert 0.05 < curve("memory/host_gib")[0][1] < 200  # a process with torch in it, in GiB
    assert curve("held out/heldout_hps") == [(0, 0.0), (1, 0.05), (2, 0.1)]
    assert curve("speed/nfe_per_second") == [(1, 5.0), (2, 5.0)]


def test_a_resumed_run_takes_back_what_was_told_after_its_checkpoint(track):
    track((iteration, 0.5) for iteration in range(5))
    time.sleep(1.1)  # files of events are named by the second and read in their order
    curve = track([(2, 0.25), (3, 0.25)], first=2).Scalars("rewards/reward_redness")
    assert {event.step: event.value for event in curve} == {0: 0.5, 1: 0.5, 2: 0.25, 3: 0.25}


def test_a_tracker_that_is_not_installed_ends_in_one_line(make_trainer, embeddings, monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    trainer = make_trainer(small_method("g2rpo"), tracking=TrackingSettings(to=("wandb",)))
    with refused("tracking.to: wandb is not installed: pip install wandb, or leave it out"):
        Display("run", trainer, embeddings, first=0)


def test_whatever_goes_wrong_in_what_is_only_shown_is_told_once_and_ends_nothing(
    trainer, embeddings, here, capsys, monkeypatch
):
    run = Display("run", trainer, embeddings, first=0)
    broken = Mock(side_effect=ConnectionError("no route to the tracker"))
    for name in ("log", "log_images", "finish"):
        monkeypatch.setattr(run.trackers[0], name, broken)
    for iteration in range(3):
        run.record(record(iteration, 0.5))
    run.finish()
    shown = capsys.readouterr().err
    assert shown.count("could not be shown") == shown.count("no route to the tracker") == 1


def test_a_run_shows_progress_samples_and_warnings(trainer, embeddings, here, capsys):
    display = Display("tiny/g2rpo-1", trainer, embeddings, first=1)
    display.record(RECORD)
    display.group(2, "a red circle", torch.rand(3, 3, 32, 32), torch.rand(1, 3))
    display.warn(2, "the ratio drifts")
    display.finish()
    said = capsys.readouterr().err
    assert "warning: g2rpo-1, iteration 2: the ratio drifts" in said
    assert "2/4" in said and "redness=0.250" in said and "NFE/s=200" in said
    shown = {file.name for file in (here / RUN).glob("*.png")}
    assert shown == {"samples.png", "group.png"}


def test_other_processes_help_to_sample_and_show_nothing(
    trainer, embeddings, here, monkeypatch, capsys
):
    trainer.processes = ProcessGroup(1, 2)
    sampled = []
    monkeypatch.setattr(
        trainer.policy,
        "decode",
        lambda latents, batch: sampled.append(len(latents)) or torch.zeros(len(latents), 3, 32, 32),
    )
    display = Display("tiny/g2rpo-1", trainer, embeddings, first=0)
    display.record(RECORD)
    display.warn(2, "the ratio drifts")
    display.finish()
    assert sum(sampled) == 3 and not capsys.readouterr().err and not list(here.iterdir())
