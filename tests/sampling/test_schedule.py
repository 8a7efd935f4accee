import json

import numpy as np
import pytest
import torch

from g2rpo_core.sampling.schedule import shifted_sigmas, tail
from tests.conftest import GOLDENS


def test_sigmas_have_the_closed_form():
    u = 1 - torch.arange(17) / 16
    torch.testing.assert_close(shifted_sigmas(16, 3.0), 3 * u / (1 + 2 * u))
    torch.testing.assert_close(shifted_sigmas(16, 1.0), u)


@pytest.mark.parametrize("name", ["steps_t16", "steps_t25_eta03"])
def test_sigmas_are_the_published_ones(name):
    golden = np.load(GOLDENS / f"{name}.npz")
    sigmas = shifted_sigmas(len(golden["sigmas"]) - 1, float(golden["shift"]))
    assert sigmas.dtype == torch.float32
    np.testing.assert_allclose(sigmas, golden["sigmas"], rtol=0, atol=2e-7)


def test_released_tails_are_the_published_ones():
    golden = json.loads((GOLDENS / "tails_t16.json").read_text())
    sigmas = shifted_sigmas(golden["T"], golden["shift"])
    total = 0
    for published in golden["tails"]:
        steps = tail(golden["T"], published["noisy_step"], published["granularity"])
        assert steps == published["evaluated_steps"]
        np.testing.assert_allclose(sigmas[steps], published["evaluated_sigmas"], atol=1e-7)
        total += len(steps)
    assert total == golden["evaluations"] == 173


def test_paper_tails_count_from_the_clean_end():
    # Eq. 10 with T = 16, k = 16 in the paper's count (our 0): S = {1, 1 + lambda, ...} is our {15,
    # 15 - lambda, ...}
    assert tail(16, 0, 2, "paper") == [1, 3, 5, 7, 9, 11, 13, 15]
    assert tail(16, 0, 3, "paper") == [1, 3, 6, 9, 12, 15]
    assert tail(16, 1, 4, "paper") == [2, 3, 7, 11, 15]


@pytest.mark.parametrize("grid", ["released", "paper"])
@pytest.mark.parametrize("steps", [2, 3, 10, 16])
def test_every_tail_starts_after_the_noise_and_rises(grid, steps):
    for sde_step in range(steps - 1):
        assert tail(steps, sde_step, 1, grid) == list(range(sde_step + 1, steps))
        for granularity in range(1, steps + 2):
            indices = tail(steps, sde_step, granularity, grid)
            assert indices[0] == sde_step + 1
            assert indices == sorted(set(indices))
            assert indices[-1] < steps


@pytest.mark.parametrize(
    ("made", "arguments"),
    [
        *((tail, wrong) for wrong in ((16, 15, 1), (16, -1, 1), (16, 0, 0), (16, 0, 1, "other"))),
        *((shifted_sigmas, wrong) for wrong in ((0, 3.0), (4, 0.0), (4, -1.0))),
    ],
)
def test_impossible_tails_and_sigmas_are_refused(made, arguments):
    with pytest.raises(ValueError):
        made(*arguments)


def test_even_tails_have_equal_steps_and_are_mix_grpo_flashs_at_its_setting():
    # Its 0.4 of T = 25 after the window 0...3: 8 points, 7 steps
    assert tail(25, 3, 3, "even") == list(range(4, 23, 3))
    for steps, sde_step, granularity in ((16, 2, 2), (10, 4, 3), (10, 8, 3)):
        path = [*tail(steps, sde_step, granularity, "even"), steps]
        assert path[0] == sde_step + 1
        np.testing.assert_allclose(np.diff(path), path[1] - path[0])
        assert abs((path[1] - path[0]) - granularity) < granularity / 2 or len(path) == 2
