"""Numbers of the studies' READMEs, computed from their committed tables with pandas and scipy."""

import json

import pandas as pd
import pytest
from ruamel.yaml import YAML
from scipy import stats

from tests.conftest import ROOT

FINDINGS = "".join(path.read_text() for path in sorted((ROOT / "studies").glob("**/README.md")))
SENTENCES = " ".join(FINDINGS.split())


def params(study: str) -> dict:
    """What a study compares."""
    return YAML(typ="safe").load(ROOT / "studies" / study / "params.yaml")


def gains(study: str, method: str, reward: str, steps: int | None = None) -> pd.Series:
    """The gain over the base of every seed, at the study's first number of steps or at another."""
    table = pd.read_parquet(ROOT / "studies" / study / "results.parquet")
    rows = table[(table.part == "run") & (table.method == method) & (table.reward == reward)]
    return rows[rows.steps == (steps or rows.steps.iloc[0])].set_index("seed").difference


def written(values: pd.Series, confidence: float) -> str:
    """The mean and its interval by Student's t, as the page has them."""
    low, high = stats.t.interval(confidence, len(values) - 1, values.mean(), stats.sem(values))
    return f"{values.mean():+.3f} [{low:+.3f}, {high:+.3f}]".replace("-", "−")


@pytest.mark.parametrize(
    "study, holding", [("verdict", 2), ("marks", 1), ("marks_late", 4), ("families", 0)]
)
def test_preregistered_comparisons_follow_from_the_committed_table(study, holding):
    named = params(study)["comparisons"]
    held = 0
    for one in named:
        reward = one.get("reward", "training")
        apart = gains(study, one["method"], reward) - gains(study, one["against"], reward)
        joint = written(apart, 1 - 0.05 / len(named))
        ends = [
            f"| {joint} | {said} | {(apart > 0).sum()} of {len(apart)} |"
            for said in ("**yes**", "no")
        ]
        (row,) = (line for line in FINDINGS.splitlines() if line.endswith(tuple(ends)))
        low = stats.t.interval(
            1 - 0.05 / len(named), len(apart) - 1, apart.mean(), stats.sem(apart)
        )[0]
        holds = low > -one.get("margin", 0)
        assert ("**yes**" in row) == holds
        held += holds
    assert held == holding


@pytest.mark.parametrize(
    "study",
    [
        "verdict",
        "marks",
        "marks_late",
        "families",
        "equal_compute",
        "equal_compute_marks",
        "dose",
        "ladder",
        "long",
        "words",
    ],
)
def test_a_methods_row_has_its_cost_seconds_and_gains(study):
    table = pd.read_parquet(ROOT / "studies" / study / "results.parquet")
    seconds = json.loads((ROOT / "studies" / study / "seconds.json").read_text())
    last = table[table.part == "training"].groupby(["method", "seed"]).last().reset_index()
    for method, runs in last.groupby("method"):
        costs = [
            f"{runs[name].mean():,.0f}"
            for name in ("iteration", "num_forward_evals", "num_transitions")
        ]
        # where entries train on different rewards, on one that all are judged by
        judged = {"dose": "hps", "words": "ocr"}.get(study, "training")
        both = [written(gains(study, method, reward), 0.95) for reward in (judged, "verifier")]
        cells = [*costs, f"{seconds[method]['seconds']:.0f}", *both]
        assert " | ".join(cells) in FINDINGS, cells


@pytest.mark.parametrize(
    "study", ["equal_compute", "equal_compute_marks", "dose", "ladder", "long", "words"]
)
def test_comparisons_over_bases_hold_by_the_primary_one_and_by_holm(study):
    """The primary one comes first, and the secondary one holds only if it does.

    One expected to be level has two one-sided tests. Holm multiplies the smallest of k p-values
    by k, the next by k − 1, and so on.
    """
    others: list[tuple[float, pd.Series, bool]] = []
    holds = True
    for one in params(study)["comparisons"]:
        reward = one.get("reward", "training")
        apart = gains(study, one["method"], reward) - gains(study, one["against"], reward)
        p = stats.ttest_1samp(apart, 0).pvalue
        if "level" in one:
            sides = ((-one["level"], "greater"), (one["level"], "less"))
            p = max(stats.ttest_1samp(apart, edge, alternative=side).pvalue for edge, side in sides)
        if "role" in one:
            holds = holds and p < 0.05 and apart.mean() > 0
            said = "**yes**" if holds else "no"
            assert f"{one['role']} | {written(apart, 0.95)} | {p:.2g} | | {said} |" in FINDINGS
        else:
            others.append((p, apart, "level" in one or apart.mean() > 0))
    least = 0.0
    for rank, (p, apart, as_expected) in enumerate(sorted(others, key=lambda each: each[0])):
        least = max(least, min(1.0, p * (len(others) - rank)))
        said = "**yes**" if least < 0.05 and as_expected else "no"
        above = f"{int((apart > 0).sum())} of {len(apart)}"
        assert f"| {written(apart, 0.95)} | {p:.2g} | {least:.2g} | {said} | {above} |" in FINDINGS


def test_the_ladder_says_on_which_rungs_a_method_stays_above_mix_grpo():
    """By the mean over bases, by an interval of 95 %, and on every base."""
    rungs = ("4p", "16p", "t16", "t28", "lora", "constant")
    apart = {
        (method, rung): gains("ladder", f"{method}_{rung}", "training")
        - gains("ladder", f"mix_{rung}", "training")
        for method in ("nft", "coarse")
        for rung in rungs
    }
    higher = {key for key, values in apart.items() if values.mean() > 0}
    shown = {
        key
        for key, values in apart.items()
        if stats.ttest_1samp(values, 0, alternative="greater").pvalue < 0.025
    }
    assert [rung for rung in rungs if ("nft", rung) not in higher] == ["16p"] and apart[
        "nft", "16p"
    ].mean() < 0
    said = (
        "its mean is higher on five of six, and lower with 16 prompts. In the reward, "
        "the interval is above zero on none."
    )
    assert said in SENTENCES
    assert len([rung for rung in rungs if ("coarse", rung) in higher]) == 4 and shown == {
        ("coarse", "t28")
    }
    assert [rung for rung in rungs if (apart["coarse", rung] > 0).all()] == ["t16", "t28"]
    said = (
        "the higher mean on four rungs of six**, and is above MixGRPO on all four bases with T = "
        "16 and T = 28."
    )
    assert said in SENTENCES
    four = gains("equal_compute", "nft_shared", "training") - gains(
        "equal_compute", "mix_grpo", "training"
    )
    said = (
        "significant over the eight of `equal_compute` is "
        f"{written(four.loc[[10, 11, 12, 13]], 0.95)}"
    )
    assert said in SENTENCES


def test_long_runs_at_each_number_of_steps():
    """Also where the training reward ends above the base and the verifier below it."""
    apart = []
    for method, entry in params("long")["entries"].items():
        cells = []
        for steps in (4, 10, 20):
            reward, verifier = (
                gains("long", method, judged, steps) for judged in ("training", "verifier")
            )
            cells.append(f"{reward.mean():+.3f}, {verifier.mean():+.3f}")
            apart += [
                (method, base, steps) for base in reward.index if reward[base] > 0 > verifier[base]
            ]
        assert f"| {entry.get('label', 'MixGRPO')} | {' | '.join(cells)} |" in FINDINGS
    assert sorted(apart) == [("mix_grpo", 10, 4), ("sum", 10, 10), ("sum", 10, 20)]
    for steps in (4, 10, 20):
        assert (
            gains("long", "sum", "training", steps) < gains("long", "fine", "training", steps)
        ).all()
    for steps in (4, 10):
        lead = gains("long", "nft_shared", "training", steps) - gains(
            "long", "mix_grpo", "training", steps
        )
        assert written(lead, 0.95) in SENTENCES and (lead > 0).all()


def probed(study: str) -> list[dict]:
    """What `g2rpo probe --gradients` measured for a study, without training."""
    return json.loads((ROOT / "studies" / study / "gradients.json").read_text())


USUAL = {
    "g2rpo": (range(8), (1, 2, 3)),
    "g2rpo_coarse": (range(3, 8), (3,)),
}  # steps and granularities of profile tiny_marks
CHOICES = ("coarse", "early", "half", "late", "tail_1", "tail_2", "tails_1_3")


def test_gradients_rank_the_choices_as_the_page_says():
    """Predicted by the mean squared signal-to-noise of an entry's steps per evaluation."""
    pairs = {"choices": [], "marks_choices": []}
    for study, rows in pairs.items():
        by = {(one["step"], *one["granularities"]): one for one in probed(study)}
        entries = params(study)["entries"]
        for name in CHOICES if study == "choices" else entries:
            tree, usual = (
                entries[name].get("settings", {}).get("tree", {}),
                USUAL[entries[name]["method"]],
            )
            steps = [
                by[(step, *tree.get("granularities", usual[1]))]
                for step in tree.get("sde_steps", usual[0])
            ]
            signal = (
                1000
                * sum(one["snr2"] for one in steps)
                / sum(one["evaluations"] * one["prompts"] for one in steps)
            )
            rows.append((signal, gains(study, name, "training").mean()))
            assert "| {:.3f} | {:+.3f} |".format(*rows[-1]).replace("-", "−") in FINDINGS, name
    first, second, both = (
        stats.spearmanr(*zip(*rows)).statistic
        for rows in (*pairs.values(), [*pairs["choices"], *pairs["marks_choices"]])
    )
    assert f"The rank correlation of the two is {both:.2f} over fourteen entries" in SENTENCES
    assert (
        f"It is {first:.2f} over the seven of the first task and {second:.2f} over the seven of "
        "the second." in SENTENCES
    )


@pytest.mark.parametrize("study, steps", [("choices", 9), ("marks_choices", 12)])
def test_a_sum_has_less_signal_per_evaluation_than_the_best_of_its_tails(study, steps):
    per = {
        (one["step"], *one["granularities"]): one["snr2"] / one["evaluations"]
        for one in probed(study)
    }
    assert all(
        per[step, 1, 2, 3] < max(per[step, tail] for tail in (1, 2, 3)) for step in range(steps)
    )
    assert f"{steps} {'steps of `tiny`' if steps == 9 else 'of `tiny_marks`'}" in SENTENCES


def test_gradients_of_whole_iterations_rank_methods_as_the_page_says():
    rows = pd.DataFrame(probed("equal_compute"))
    signal = (rows.snr2 / rows.compute).groupby(rows.method).mean()
    gained = [gains("equal_compute", method, "training").mean() for method in signal.index]
    said = (
        "the rank correlation of the signal for each unit of compute with the gain is "
        f"{stats.spearmanr(signal, gained).statistic:.2f}"
    )
    assert sorted(set(rows.base)) == [*range(10, 18)] and len(signal) == 10 and said in SENTENCES
    assert set(signal.nlargest(3).index) == {"awm_shared", "nft_shared", "nft_leaves"}
    assert set(signal.nsmallest(2).index) == {"dance_grpo", "mix_grpo"}


def test_rates_at_equal_total_compute_are_those_that_the_protocols_rule_chooses():
    """The smallest rate within one standard error of the best; all methods share a variance.

    That error is of the first study alone: in the second a method collapses.
    """
    tables: dict[str, dict[int, pd.Series]] = {}
    for study in ("equal_compute_rates", "equal_compute_rates_more"):
        for entry in params(study)["entries"]:
            method, _, rate = entry.rpartition("_")
            tables.setdefault(method, {})[int(rate)] = gains(study, entry, "training")
    rest = []
    for table in (pd.DataFrame(dict(list(rates.items())[:3])) for rates in tables.values()):
        rest.append(
            (table.sub(table.mean(axis=1), axis=0) - table.mean() + table.stack().mean()).to_numpy()
        )
    error = (
        sum((part**2).sum() for part in rest) / (4 * len(rest)) * 2 / 3
    ) ** 0.5  # 3 bases, 3 rates each
    assert f"standard error is {error:.4f}" in SENTENCES
    taken = params("equal_compute")["entries"]
    for method, rates in tables.items():
        means = {rate: rates[rate].mean() for rate in sorted(rates)}
        chosen = next(rate for rate, mean in means.items() if mean > max(means.values()) - error)
        cells = [
            f"**{value:+.3f}**" if rate == chosen else f"{value:+.3f}"
            for rate, value in means.items()
        ]
        assert f"| {' | '.join(cells)} |".replace("-", "−") in FINDINGS, method
        assert taken[method]["training"]["learning_rate"] == pytest.approx(chosen * 1e-6), method
