"""Runs compared at equal training reward."""

import numpy as np
import pytest

from studies.words_equal.equal_reward import read_at


def test_a_value_is_read_where_the_reward_first_reaches_the_level():
    reward, judge = np.array([0.0, 0.1, 0.3, 0.2, 0.4]), np.array([0.0, -1.0, -2.0, 7.0, 9.0])
    assert read_at(reward, judge, 0.0) == 0
    assert read_at(reward, judge, 0.1) == -1
    assert read_at(reward, judge, 0.15) == pytest.approx(-1.25)
    assert read_at(reward, judge, 0.35) == pytest.approx(8.5)
