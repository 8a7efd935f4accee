import numpy as np
import pandas as pd
import pytest


@pytest.fixture
def results():
    """Two rewards of 50 prompts: the base, and two runs at +0.1 and -0.2 in the first reward."""
    rng = np.random.default_rng(0)
    prompts = [f"p{n}" for n in range(50)]
    base = {"hps": rng.normal(0.3, 0.1, 50), "clip_score": rng.normal(0.5, 0.1, 50)}
    parts = []
    for method, seed, shift in (("g2rpo", 1, 0.1), ("base", 0, 0.0), ("dance_grpo", 1, -0.2)):
        order = rng.permutation(50)  # prompts may stand in any order: pairing is by id
        for reward, values in base.items():
            scores = values[order] + (shift if reward == "hps" else 0.0)
            parts.append(
                pd.DataFrame(
                    {
                        "method": method,
                        "seed": seed,
                        "style": np.where(order % 5, "one", "two"),
                        "prompt_id": np.array(prompts)[order],
                        "reward": reward,
                        "score": scores,
                    }
                )
            )
    return pd.concat(parts, ignore_index=True)
