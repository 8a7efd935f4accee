"""The one picture of all that `g2rpo generate --grid` writes."""

import numpy as np
import torch

from g2rpo_core.inference.pictures import side_by_side


def test_runs_stand_side_by_side_in_the_order_given():
    """Two runs, three prompts, two seeds, each image of a colour of its own."""
    shades = torch.arange(1, 13).reshape(2, 3, 2) / 255 * 20
    drawn = {
        name: [row[:, None, None, None].expand(2, 3, 8, 8) for row in rows]
        for name, rows in zip(("zeta-1", "base"), shades)
    }
    sheet = np.asarray(side_by_side(drawn, ["a red circle", "a long prompt " * 20, "b"], [4, 7]))
    levels = np.rint(shades.numpy() * 255)
    places = np.array(
        [np.argwhere((sheet == level).all(-1)).mean(0) for level in levels.flatten()]
    ).reshape(2, 3, 2, 2)
    rows, columns = places[..., 0], places[..., 1]
    assert (np.diff(rows, axis=1) > 90).all() and np.ptp(rows, axis=(0, 2)).max() < 9
    assert (np.diff(columns, axis=2) > 90).all() and (columns[1] > columns[0].max()).all()
