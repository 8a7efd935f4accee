"""The one picture of all that `g2rpo generate --grid` writes."""

import numpy as np
import torch

from g2rpo_core.cli.generate import check_grid
from g2rpo_core.inference.pictures import side_by_side
from tests.fixtures.errors import refused


def test_runs_stand_side_by_side_in_the_order_given_with_names_and_prompts():
    """Two runs, three prompts, two seeds, each image of a colour of its own."""
    shades = torch.arange(12).reshape(2, 3, 2) / 255 * 20
    drawn = {
        name: [row[:, None, None, None].expand(2, 3, 8, 8) for row in rows]
        for name, rows in zip(("zeta-1", "base"), shades)
    }
    sheet = np.asarray(side_by_side(drawn, ["a red circle", "a long prompt " * 20, "b"], [4, 7]))

    def place(run: int, prompt: int, seed: int) -> tuple[int, int]:
        """The first row and column with this shade alone for 90 pixels; letters have others."""
        same = (sheet == round(float(shades[run, prompt, seed]) * 255)).all(-1)
        top = int(np.argmax(same.sum(1) >= 90))
        return top, int(np.argmax(same[top + 48]))

    places = np.array(
        [
            [[place(run, prompt, seed) for seed in range(2)] for prompt in range(3)]
            for run in range(2)
        ]
    )
    assert (np.diff(places[..., 1], axis=2) >= 96).all() and (
        np.diff(places[..., 1], axis=0) >= 2 * 96
    ).all()
    assert (np.diff(places[..., 0], axis=1) >= 96).all() and (
        np.ptp(places[..., 0], axis=(0, 2)) == 0
    ).all()


def test_a_grid_that_nobody_could_open_is_refused_before_it_is_drawn(tiny):
    check_grid(14_563, tiny.evaluation)  # of 96 x 96, to which small images are enlarged
    with refused("generate: --grid: 14564 images of 32 x 32 are too many for one picture of 128"):
        check_grid(14_564, tiny.evaluation)
