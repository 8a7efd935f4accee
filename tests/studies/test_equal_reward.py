"""Runs compared at equal training reward."""

import numpy as np
import pandas as pd
import pytest

from studies.words_equal.equal_reward import at_equal_reward, read_at


def curves(**entries: list[tuple[float, float]]) -> pd.DataFrame:
    """Rows of one base: of every entry its reward and its judge, in the order of training."""
    return pd.DataFrame(
        {"method": name, "seed": 3, "reward": reward, "judge": judge}
        for name, values in entries.items()
        for reward, judge in values
    )


def compared(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> pd.Series:
    table = at_equal_reward(curves(a=first, b=second), "a", "b", "reward", "judge")
    assert list(table.index) == [3]
    return table.loc[3]


def test_a_value_is_read_where_the_reward_first_reaches_the_level():
    reward, judge = np.array([0.0, 0.1, 0.3, 0.2, 0.4]), np.array([0.0, -1.0, -2.0, 7.0, 9.0])
    assert read_at(reward, judge, 0.0) == 0
    assert read_at(reward, judge, 0.1) == -1
    assert read_at(reward, judge, 0.15) == pytest.approx(-1.25)
    assert read_at(reward, judge, 0.35) == pytest.approx(8.5)


def test_the_level_is_what_both_reach_and_gains_are_counted_from_each_start():
    found = compared([(0.5, 0.7), (0.7, 0.6)], [(0.6, 0.9), (0.7, 0.6), (0.4, 0.1)])
    assert found.level == pytest.approx(0.1)
    assert found.difference == pytest.approx(-0.05 - -0.3)
