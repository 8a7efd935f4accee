"""Numbers of the studies' READMEs, computed from their committed tables with pandas and scipy."""

import json
import re
from functools import cache

import pandas as pd
import pytest
from ruamel.yaml import YAML
from scipy import optimize, stats

from g2rpo_core.config import load_profile, load_study, profile_path
from g2rpo_core.config.costs import cost_of_prompt
from g2rpo_core.config.profile import ResolvedRun
from studies.words_equal.equal_reward import at_equal_reward
from tests.conftest import ROOT

FINDINGS = "".join(path.read_text() for path in sorted((ROOT / "studies").glob("**/README.md")))
SENTENCES = " ".join(FINDINGS.split())


OVER_BASES = (
    "equal_compute",
    "equal_compute_marks",
    "dose",
    "ladder",
    "long",
    "words",
    "paper_over_bases",
    "equal_compute_cliff",
    "words_equal",
)
NUMBERS = {6: "six", 7: "seven", 8: "eight", 9: "nine"}
TRAINED_ON = ("hps", "clip_score")  # also of entries that train on random numbers
JUDGES = {
    "dose": ("hps",),
    "words": ("ocr",),
    "words_equal": ("ocr",),
    "paper_over_bases": TRAINED_ON,
    "equal_compute_cliff": TRAINED_ON,
}


def params(study: str) -> dict:
    """What a study compares."""
    return YAML(typ="safe").load(ROOT / "studies" / study / "params.yaml")


@cache
def results(study: str) -> pd.DataFrame:
    """Return a study's committed table, read once: callers leave it as it is."""
    return pd.read_parquet(ROOT / "studies" / study / "results.parquet")


def gains(study: str, method: str, reward: str, steps: int | None = None) -> pd.Series:
    """The gain over the base of every seed, at the study's first number of steps or at another."""
    table = results(study)
    rows = table[(table.part == "run") & (table.method == method) & (table.reward == reward)]
    return rows[rows.steps == (steps or rows.steps.iloc[0])].set_index("seed").difference


def trained_reward(study: str, method: str) -> pd.Series:
    """The gain in HPS-v2.1 + CLIP Score, whatever the entry trains on."""
    return sum(gains(study, method, reward) for reward in TRAINED_ON)


def higher_with_a_lower_verifier(study: str) -> int:
    """In how many runs the trained reward ends above the base and the verifier below it."""
    return sum(
        ((trained_reward(study, method) > 0) & (gains(study, method, "verifier") < 0)).sum()
        for method in params(study)["methods"]
    )


def difference(study: str, comparison: dict) -> pd.Series:
    """Of a comparison that was named, the one method's gains minus the other's."""
    reward = comparison.get("reward", "training")
    one, other = (gains(study, comparison[name], reward) for name in ("method", "against"))
    return one - other


def at_equal_ocr(method: str, judge: str) -> pd.DataFrame:
    """Of `words_equal`, how far an entry is above OCR alone where both have gained as much."""
    table = results("words_equal")
    curves = table[table.part == "training"]
    return at_equal_reward(curves, method, "ocr", "heldout_ocr", f"heldout_{judge}")


def primary(study: str) -> pd.Series:
    """The difference that a study named as its primary one, of every base."""
    if study == "words_equal":  # not a comparison of runs' ends
        return at_equal_ocr("ocr_kl", "verifier").difference
    named = params(study)["comparisons"]
    return difference(study, next(one for one in named if one.get("role") == "primary"))


def run_of(study: str, method: str) -> ResolvedRun:
    named = load_study(study)
    return load_profile(profile_path(named.profile), named).run(method)


def total_compute(study: str, method: str) -> float:
    """Of its runs on average: three forward evaluations a trained state, half of one an image.

    For methods without velocities of the base or of an old policy.
    """
    table = results(study)
    records = table[(table.part == "training") & (table.method == method)]
    last = records.groupby("seed").last()
    images = cost_of_prompt(run_of(study, method)).images
    return float(
        (last.num_forward_evals + 3 * last.num_transitions + images / 2 * last.iteration).mean()
    )


def rate_and_path(study: str) -> dict[str, tuple[float, float]]:
    """Of every entry its learning rate, in 1e-5, and that rate times its optimizer steps."""
    named = load_study(study)
    profile = load_profile(profile_path(named.profile), named)
    found = {}
    for method in named.methods:
        run = profile.run(method)
        rate = 1e5 * run.training.learning_rate
        updates = run.method.num_updates(run.sampling.steps)
        found[method] = rate, rate * run.training.iterations * updates
    return found


def written(values: pd.Series, confidence: float) -> str:
    """The mean and its interval by Student's t, as the page has them."""
    low, high = stats.t.interval(confidence, len(values) - 1, values.mean(), stats.sem(values))
    return f"{values.mean():+.3f} [{low:+.3f}, {high:+.3f}]".replace("-", "−")


def exact(values: pd.Series, beyond: float = 0.0, side: str = "two-sided") -> float:
    """p of the mean being `beyond`, over all signs of the distances from it."""
    data, all_signs = ((values - beyond).to_numpy(),), 2 ** len(values)
    return stats.permutation_test(
        data,
        lambda x: x.mean(),
        permutation_type="samples",
        n_resamples=all_signs,
        alternative=side,
    ).pvalue


def holm(p_values: list[float]) -> list[float]:
    """The smallest of k times k, the next times k − 1, and so on; none below the one before."""
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = adjusted[place] = max(least, min(1.0, p_values[place] * (len(p_values) - rank)))
    return adjusted


@pytest.mark.parametrize(
    "study, holding", [("verdict", 2), ("marks", 1), ("marks_late", 4), ("families", 0)]
)
def test_preregistered_comparisons_follow_from_the_committed_table(study, holding):
    named = params(study)["comparisons"]
    held = 0
    for one in named:
        apart = difference(study, one)
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


@pytest.mark.parametrize("study", ["verdict", "marks", "marks_late", "families", *OVER_BASES])
def test_a_methods_row_has_its_cost_seconds_and_gains(study):
    table = results(study)
    seconds = json.loads((ROOT / "studies" / study / "seconds.json").read_text())
    last = table[table.part == "training"].groupby(["method", "seed"]).last().reset_index()
    paths = rate_and_path(study) if study in OVER_BASES else {}
    for method, runs in last.groupby("method"):
        costs = [
            f"{runs[name].mean():,.0f}"
            for name in ("iteration", "num_forward_evals", "num_transitions")
        ]
        # where entries train on different rewards, on what all are judged by
        judged = JUDGES.get(study, ("training",))
        reward = sum(gains(study, method, name) for name in judged)
        both = [written(each, 0.95) for each in (reward, gains(study, method, "verifier"))]
        cells = [*costs, f"{seconds[method]['seconds']:.0f}", *both]
        if paths:
            rate, path = paths[method]
            cells = [f"{rate:g}", f"{path:,.0f}", *cells]
        assert " | ".join(cells) in FINDINGS, cells


@pytest.mark.parametrize("study", OVER_BASES)
def test_comparisons_over_bases_hold_by_the_primary_one_and_by_holm(study):
    """The primary one comes first, and the secondary one holds only if it does.

    One expected to be level has two one-sided tests, whose interval is the 90 % one.
    """
    named, rows, holds = params(study)["comparisons"], [], True
    for one in named:
        apart = difference(study, one)
        sides, interval = [(0.0, "two-sided")], written(apart, 0.95)
        if "level" in one:
            sides = [(-one["level"], "greater"), (one["level"], "less")]
            interval = f"{written(apart, 0.90)} (90 %)"
        p = max(stats.ttest_1samp(apart, edge, alternative=side).pvalue for edge, side in sides)
        rows.append((one, apart, interval, p, max(exact(apart, *each) for each in sides)))
    others = [row for row in rows if "role" not in row[0]]
    adjusted = zip(*(holm([row[place] for row in others]) for place in (3, 4)))
    for one, apart, interval, p, by_signs in rows:
        if "role" in one:
            judged = by_signs if one.get("test") == "exact" else p
            holds = holds and judged < 0.05 and apart.mean() > 0
            cells = f"{one['role']} | {interval} | {p:.2g} | | {by_signs:.2g} | | "
        else:
            by_holm, exact_holm = next(adjusted)
            cells = f"| {interval} | {p:.2g} | {by_holm:.2g} | {by_signs:.2g} | {exact_holm:.2g} | "
            # By the test that was named: Student's, or the exact one
            judged = exact_holm if one.get("test") == "exact" else by_holm
            holds_alone = judged < 0.05 and ("level" in one or apart.mean() > 0)
        said = "**yes**" if (holds if "role" in one else holds_alone) else "no"
        row = f"{cells}{said} | {(apart > 0).sum()} of {len(apart)} |"
        assert row in FINDINGS, row


def test_runs_that_raise_the_reward_and_lose_the_verifier_are_counted():
    counts = {}
    for study in ("equal_compute", "equal_compute_marks"):
        table = results(study)
        runs = table[(table.part == "run") & (table.method != "base")]
        reward, verifier = (
            runs[runs.reward == name].set_index(["method", "seed"])
            for name in ("training", "verifier")
        )
        lost = verifier.high < 0
        counts[study] = (
            len(runs[["method", "seed"]].drop_duplicates()),
            ((reward.difference > 0) & (verifier.difference < 0)).sum(),
            lost.sum(),
            (lost & (reward.difference > 0)).sum(),
        )
    assert counts == {"equal_compute": (80, 10, 2, 1), "equal_compute_marks": (54, 11, 10, 3)}
    assert (
        "In 10 of the 80 runs the reward ends above the base and the verifier below it; in two the "
        "verifier is significantly lower."
    ) in SENTENCES
    assert (
        "in 11 of the 54 runs the reward ends above the base and the verifier below it, and 10 "
        "lose the verifier significantly, three of them with a higher reward."
    ) in SENTENCES


def test_the_compute_of_dance_grpo_is_said_as_it_was():
    for study, meant in (("equal_compute", 21_900), ("equal_compute_marks", 21_950)):
        total = total_compute(study, "dance_grpo")
        said = f"DanceGRPO, which had {total:,.0f} ({100 * (total / meant - 1):+.1f} %)"
        assert said in SENTENCES, said


@pytest.mark.parametrize(
    "study, method, against, reward, said",
    [
        ("equal_compute", "g2rpo_coarse", "mix_grpo", "training", "a difference of {} between"),
        ("equal_compute", "nft_shared", "mix_grpo", "training", "and of {} between matching and"),
        ("equal_compute_marks", "coarse_late", "mix_grpo", "training", "of {} between late noise"),
        ("dose", "sum_noisy", "fine_noisy", "hps", "a primary difference of {}."),
        ("ladder", "nft_lora", "mix_lora", "training", "could see a difference of {}."),
        ("long", "sum", "fine", "verifier", "one of {} is seen with a power of 80 %"),
        ("paper_over_bases", "g2rpo", "mix_grpo", "training", "a primary difference of {}, common"),
        ("paper_over_bases", "match_shared", "match_own", "training", "− own noise of {}, MGAI"),
        ("paper_over_bases", "g2rpo", "g2rpo_no_mgai", "training", "MGAI of {}."),
        ("equal_compute_cliff", "match", "mix", "training", "a primary difference of {}, with a"),
        ("equal_compute_cliff", "match", "mix_best", "training", "80 %, and {} to MixGRPO at"),
        ("words_equal", "ocr_kl", "ocr", None, "a primary difference of {}, with a power"),
    ],
)
def test_what_a_comparison_could_see(study, method, against, reward, said):
    """The difference that Student's t finds at 5 % with a power of 80 %, at the deviation seen."""
    named = {"method": method, "against": against, "reward": reward}
    apart = difference(study, named) if reward else primary(study)
    count, unit = len(apart), apart.std() / len(apart) ** 0.5
    least = stats.t.ppf(0.975, count - 1)
    power = lambda difference: stats.nct.sf(least, count - 1, difference / unit)
    seen = optimize.brentq(lambda difference: power(difference) - 0.8, unit, 8 * unit)
    assert said.format(f"{seen:.3f}") in SENTENCES


USUAL = {
    "g2rpo": (range(8), (1, 2, 3)),
    "g2rpo_coarse": (range(3, 8), (3,)),
}  # steps and granularities of profile tiny_marks
CHOICES = ("coarse", "early", "half", "late", "tail_1", "tail_2", "tails_1_3")


def test_the_page_in_front_of_all_findings_is_one_page():
    text = (ROOT / "studies" / "README.md").read_text()
    page = text.partition("## What we know")[2].partition("\n## ")[0]
    assert 200 < len(re.sub(r"\]\([^)]*\)", "]", page).split()) <= 450


def test_no_primary_comparison_survives_the_correction_for_all_of_them():
    """The table of studies over bases has the primary one of each, with both tests."""
    table = (ROOT / "studies" / "README.md").read_text()
    p_values, by_signs = [], []
    for study in OVER_BASES:
        apart = primary(study)
        p_values.append(stats.ttest_1samp(apart, 0).pvalue)
        by_signs.append(exact(apart))
        numbers = f"{written(apart, 0.95)} | {p_values[-1]:.2g}, {by_signs[-1]:.2g} |"
        assert re.search(
            rf"^\| \[{study}\].*\| {len(apart)} \| .*{re.escape(numbers)}", table, re.MULTILINE
        )
    best, best_exact = (min(holm(values)) for values in (p_values, by_signs))
    said = (
        f"Of {NUMBERS[len(p_values)]} primary comparisons none survives the correction for "
        f"{NUMBERS[len(p_values)]}** (smallest p {min(p_values):.2g}, then {best:.2g}; exact "
        f"{best_exact:.2g})."
    )
    assert best > 0.05 and said in SENTENCES


def test_the_papers_comparison_at_both_budgets_and_what_matching_is_made_of():
    study = "paper_over_bases"
    of = lambda method: trained_reward(study, method)
    methods = params(study)["methods"]
    compute = lambda method: total_compute(study, method)
    most = compute("g2rpo")
    assert f"total compute, {most:,.0f} (MixGRPO {compute('mix_long'):,.0f}, as" in SENTENCES
    assert f"DanceGRPO {compute('dance_long'):,.0f})" in SENTENCES
    ratios = [f"{most / compute(method):.1f}" for method in ("mix_grpo", "dance_grpo")]
    assert f"for {ratios[0]} and {ratios[1]} times their total compute." in SENTENCES
    share = 100 * compute("g2rpo_no_mgai") / most
    assert f"for {share:.0f} % of the compute." in SENTENCES
    kept = 100 * of("match_own").mean() / of("match_shared").mean()
    assert f"{kept:.0f} % of its gain is there with each image's own noise" in SENTENCES
    for method in ("match_placebo", "coarse_placebo"):
        assert (of(method) < 0).all() and written(of(method), 0.95) in SENTENCES
    lower = (of("coarse_placebo") < of("match_placebo")).sum()
    assert f"coarse-only G²RPO lower than matching (on {lower} of 8)" in SENTENCES
    lost = higher_with_a_lower_verifier(study)
    assert f"In {lost} of the {8 * len(methods)} runs the training reward" in SENTENCES


AT_BOTH_RATES = {  # of equal_compute_cliff: at half of the cliff, and at the other rate
    "awm_shared": "awm_shared_best",
    "match": "match_before",
    "stepwise": "stepwise_best",
    "fast": "fast_best",
    "awm": "awm_best",
    "mix": "mix_best",
    "dance": "dance_best",
    "diffusion_nft": "nft_best",
}


SEEN_ON_WORDS = ("color", "letters", "clip_score", "hps", "pickscore", "image_reward")
