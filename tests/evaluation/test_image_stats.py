import pytest
import torch

from g2rpo_core.evaluation import image_stats


def test_image_statistics_have_their_closed_forms():
    grey, red = torch.full((1, 3, 8, 8), 0.4), torch.zeros(1, 3, 8, 8)
    red[:, 0] = 0.7
    assert image_stats.saturation(torch.cat([grey, red])).tolist() == pytest.approx([0.0, 1.0])
    ramp = torch.linspace(0, 1, 8).expand(1, 3, 8, 8)
    board = torch.zeros(8, 8)
    board[::2, ::2] = board[1::2, 1::2] = 1.0
    flat, checkers = image_stats.sharpness(torch.cat([ramp, board.expand(1, 3, 8, 8)])).tolist()
    # a plane has no Laplacian; a chessboard's is -4 on white and 4 on black, 18 of the 36 inner pixels each
    assert flat == pytest.approx(0.0, abs=1e-6) and checkers == pytest.approx(4 * (36 / 35) ** 0.5)
    same = torch.rand(1, 5, 3, 8, 8).expand(3, 5, 3, 8, 8)
    moved = torch.stack([torch.zeros(2, 3, 8, 8), torch.full((2, 3, 8, 8), 0.5), torch.ones(2, 3, 8, 8)])
    assert image_stats.diversity(same).tolist() == pytest.approx([0.0] * 5, abs=1e-3)
    assert image_stats.diversity(moved).tolist() == pytest.approx([(0.5 + 1.0 + 0.5) / 3] * 2)
