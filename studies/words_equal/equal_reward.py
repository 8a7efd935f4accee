"""Compare runs at equal training reward, by what was measured while they trained.

    python -m studies.words_equal.equal_reward

prints the rows of the table at equal OCR in the study's README. The end of a run would compare a
run that gained much with one that gained little.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from g2rpo_core.foundation.texts import echo
from g2rpo_core.reporting.statistics import sign_flip, spread, student
from stages.entry import ends_in_one_line

HERE = Path(__file__).parent
REFERENCE, REWARD, JUDGES = "ocr", "heldout_ocr", ("heldout_verifier", "heldout_color")
ROW = "{} | {:+.3f} | {difference:+.3f} [{low:+.3f}, {high:+.3f}] | {:.2g} | {:.2g} | {} of {}"


def read_at(reward: np.ndarray, judge: np.ndarray, level: float) -> float:
    """Return the judge's value where the reward first reaches the level.

    reward, judge: [n], in the order of training, each as a gain over its first value. Between two
    measurements both are linear. `level` is at most the largest reward.
    """
    after = int(np.argmax(reward >= level))
    if after == 0:
        return float(judge[0])
    part = slice(after - 1, after + 1)
    return float(np.interp(level, reward[part], judge[part]))


def at_equal_reward(
    curves: pd.DataFrame, method: str, against: str, reward: str, judge: str
) -> pd.DataFrame:
    """Return, for every base, the level of the reward and how far `method` is above `against`.

    curves: rows of `part` "training", in the order of training. The level is the smaller of the two
    largest gains in the reward; it is 0 where a run never gains, and so is the difference. Columns:
    `level`, `difference`; index: the base.
    """
    rows = {}
    for base, of_base in curves.groupby("seed"):
        gains = []
        for name in (method, against):
            values = of_base.loc[of_base.method == name, [reward, judge]].to_numpy(float)
            gains.append((values - values[0]).T)
        level = min(gain[0].max() for gain in gains)
        ours, theirs = (read_at(gain[0], gain[1], level) for gain in gains)
        rows[base] = {"level": level, "difference": ours - theirs}
    return pd.DataFrame.from_dict(rows, orient="index")


@ends_in_one_line
def main() -> None:
    results = pd.read_parquet(HERE / "results.parquet")
    curves = results[results.part == "training"]
    for method in curves.method.unique():
        if method == REFERENCE:
            continue
        for judge in JUDGES:
            found = at_equal_reward(curves, method, REFERENCE, REWARD, judge)
            apart = found.difference
            tests = student(apart), sign_flip(apart), (apart > 0).sum(), len(apart)
            named = f"{method} − {REFERENCE}, {judge.removeprefix('heldout_')}"
            echo(ROW.format(named, found.level.mean(), *tests, **spread(apart)))


if __name__ == "__main__":
    main()
