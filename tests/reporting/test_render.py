import numpy as np
import pandas as pd

from g2rpo_core.reporting.images import DRAWN, choose


def test_prompts_are_chosen_by_their_change_and_by_a_draw_without_a_look_at_it():
    ids = [f"p{number:03}" for number in range(50)]
    change = pd.Series(np.linspace(-0.2, 1, 49), ids[:49])  # p049 has no score
    chosen = choose(change, ids)
    assert list(chosen["rose most"]) == ["p048", "p047", "p046"]
    assert chosen["fell most"] == {key: change[key] for key in ["p000", "p001", "p002"]}
    drawn = list(chosen["drawn at random"])
    assert len(set(drawn)) == DRAWN and drawn == list(choose(-change, ids)["drawn at random"])
