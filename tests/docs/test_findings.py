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


def test_rates_order_the_methods_of_one_task_and_not_of_the_other():
    tables = {}
    for study in ("equal_compute", "equal_compute_marks"):
        paths = rate_and_path(study)
        by_method = {method: gains(study, method, "training") for method in paths}
        tables[study] = pd.DataFrame(
            {
                "rate": {method: rate for method, (rate, _) in paths.items()},
                "path": {method: path for method, (_, path) in paths.items()},
                "gain": {method: values.mean() for method, values in by_method.items()},
                "spread": {method: values.std() for method, values in by_method.items()},
            }
        )
    first, second = tables.values()
    ranks = lambda table, one, other: stats.spearmanr(table[one], table[other])
    nine = first.drop("nft_leaves")
    by_rate, by_path = ranks(nine, "gain", "rate"), ranks(nine, "gain", "path")
    wide = ranks(first, "spread", "path")
    assert (
        f"the rank correlation of gain and rate is {by_rate.statistic:.2f} (p {by_rate.pvalue:.2g})"
        f", of gain and rate × updates {by_path.statistic:.2f}."
    ) in SENTENCES
    ten = [ranks(first, "gain", column).statistic for column in ("rate", "path")]
    assert f"over all ten they are {ten[0]:.2f} and {ten[1]:.2f}." in SENTENCES
    assert f"{wide.statistic:.2f} over all ten (p {wide.pvalue:.2g})" in SENTENCES
    both = [ranks(second, column, "path").statistic for column in ("spread", "gain")]
    said = f"rank correlations with rate × updates are {both[0]:.2f} and {both[1]:.2f}."
    assert said.replace("-", "−") in SENTENCES
    shared = first.index.intersection(second.index)
    tasks = stats.spearmanr(first.gain[shared], second.gain[shared])
    said = f"in both tasks correlate by {tasks.statistic:.2f} (p {tasks.pvalue:.2f})"
    assert len(shared) == 8 and said.replace("-", "−") in SENTENCES
    # Who is first on a base, and who is above MixGRPO in the second task
    gained = pd.DataFrame(
        {method: gains("equal_compute", method, "training") for method in first.index}
    )
    assert (gained.idxmax(axis=1) == "nft_shared").sum() == 4
    assert list(second.gain.sort_values(ascending=False).index).index("mix_grpo") == 7
    mix = gains("equal_compute_marks", "mix_grpo", "training")
    for method in ("awm", "flow_grpo_fast", "diffusion_nft"):
        assert (gains("equal_compute_marks", method, "training") > mix).all()


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


def gains_by_rate(*studies: str) -> dict[str, dict[int, pd.Series]]:
    """Of every method its gains over three bases, by the rate in 1e-6."""
    tables: dict[str, dict[int, pd.Series]] = {}
    for study in studies:
        for entry in params(study)["entries"]:
            method, _, rate = entry.rpartition("_")
            tables.setdefault(method, {})[int(rate)] = gains(study, entry, "training")
    return tables


def cliff_of(gains: dict[int, float]) -> int:
    """The smallest rate from which on every one ends below the base."""
    rates = sorted(gains)
    return next(rate for rate in rates if all(gains[each] < 0 for each in rates if each >= rate))


def test_cliffs_and_best_rates_are_those_of_the_committed_tables():
    text = (ROOT / "studies" / "cliffs" / "README.md").read_text()
    tables = gains_by_rate("equal_compute_rates", "equal_compute_rates_more", "cliffs")
    quarters = []
    for rates in tables.values():
        means = {rate: rates[rate].mean() for rate in rates}
        cliff, best = cliff_of(means), max(means, key=means.__getitem__)
        cells = [
            "" if rate not in means else f"{means[rate]:+.3f}"
            for rate in (5, 10, 20, 40, 80, 160, 320, 640)
        ]
        cells = [f"**{cell}**" if 5 * 2**at == cliff / 2 else cell for at, cell in enumerate(cells)]
        row = f"| {' | '.join([*cells, f'{cliff / 10:g}', f'{best / 10:g}'])} |"
        assert re.search(rf"^\| [^|]* {re.escape(row.replace('-', '−'))}$", text, re.MULTILINE)
        quarters.append(means[best] - means[cliff // 4])
    assert len(tables) == 10 and sum(lost < 0.0071 for lost in quarters) == 8
    # What the probe is compared with: whole runs on each base
    for method, label in (
        ("nft_shared", "Matching, common noise"),
        ("mix_grpo", "MixGRPO"),
        ("g2rpo_coarse", "G²RPO, coarse tails"),
    ):
        of_base = [
            cliff_of({rate: float(each[base]) for rate, each in tables[method].items()})
            for base in (7, 8, 9)
        ]
        assert f"| {label} | {', '.join(f'{each / 10:g}' for each in of_base)} |" in text


def test_rates_at_equal_total_compute_are_those_that_the_protocols_rule_chooses():
    """The smallest rate within one standard error of the best; all methods share a variance.

    That error is of the first study alone: in the second a method collapses.
    """
    tables = gains_by_rate("equal_compute_rates", "equal_compute_rates_more")
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


def test_half_of_the_cliff_is_no_common_measure():
    study = "equal_compute_cliff"
    of = {method: trained_reward(study, method) for method in params(study)["methods"]}
    # Matching counts as better than MixGRPO only if it is above both of its rates
    assert [exact(of["match"] - of[mix]) < 0.05 for mix in ("mix", "mix_best")] == [True, False]
    for half, said in (("mix", "ends 0.044 below"), ("stepwise", "Stepwise-Flow-GRPO (−0.041)")):
        lost = of[AT_BOTH_RATES[half]] - of[half]
        assert f"{lost.mean():.3f}" in said and said in SENTENCES
    # The one base on which coarse-only G²RPO collapses
    coarse = of["g2rpo_coarse"]
    assert coarse.idxmin() == 45 and f"{coarse.min():.3f} on base 45".replace("-", "−") in SENTENCES
    assert f"On the seven others here it gains {coarse.drop(45).mean():+.3f}" in SENTENCES
    # The rank correlations, at half of the cliff and at the best rates of development
    paths = rate_and_path(study)
    best = {half: other for half, other in AT_BOTH_RATES.items() if half != "match"}
    halves = [*AT_BOTH_RATES, "g2rpo_coarse", "leaves"]
    for methods, by_rate, wide in (
        (halves, "0.15 at half of the cliff", "0.59 (p 0.074)"),
        ([best.get(method, method) for method in halves], "0.40 at the best rates", "0.72 (p 0.0"),
    ):
        rates, lengths = zip(*(paths[method] for method in methods))
        means, spreads = zip(*((of[method].mean(), of[method].std()) for method in methods))
        assert by_rate.startswith(f"{stats.spearmanr(means, rates).statistic:.2f} ")
        assert wide.startswith(f"{stats.spearmanr(spreads, lengths).statistic:.2f} (p ")
        assert by_rate in SENTENCES and wide in SENTENCES
    lost = higher_with_a_lower_verifier(study)
    assert f"In {lost} of the {8 * len(of)} runs the training reward ends above" in SENTENCES


def test_gains_at_the_rate_that_the_other_bases_choose():
    """Of a method's two rates, the one that gains more on the seven other bases."""
    study, chosen, taken = "equal_compute_cliff", {}, {}
    for half, other in AT_BOTH_RATES.items():
        table = pd.DataFrame({each: trained_reward(study, each) for each in (half, other)})
        picks = {base: table.drop(base).mean().idxmax() for base in table.index}
        taken[half] = set(picks.values())
        chosen[half] = pd.Series({base: table.loc[base, pick] for base, pick in picks.items()})
    assert all(len(picks) == 1 for picks in taken.values())
    assert (taken["match"], taken["mix"]) == ({"match_before"}, {"mix_best"})
    lead = chosen["match"] - chosen["mix"]
    said = f"matching is {written(lead, 0.95)} above it on {(lead > 0).sum()} of 8"
    assert f"{said} (exact p {exact(lead):.2g})" in SENTENCES
    leaves = trained_reward(study, "leaves").mean()
    mean = {method: f"{gained.mean():+.3f}" for method, gained in chosen.items()}
    assert (
        f"gains are {mean['awm_shared']} (AWM with common noise), {mean['match']} (matching), "
        f"{mean['stepwise']} (Stepwise-Flow-GRPO), {leaves:+.3f} (matching on leaves, "
        f"Flow-GRPO-Fast), {mean['awm']} (AWM), {mean['mix']} (MixGRPO), {mean['dance']} "
        f"(DanceGRPO) and {mean['diffusion_nft']} (DiffusionNFT)"
    ) in SENTENCES
    assert f"{leaves:+.3f}" == mean["fast"]


def test_the_lora_takes_half_of_the_largest_rate_as_it_has_no_cliff():
    study = "words_lora_rates"
    entries = params(study)["entries"]
    rates = [entry["training"]["learning_rate"] for entry in entries.values()]
    taken = params("words_equal")["entries"]["ocr_lora"]["training"]["learning_rate"]
    for label, reward in (("OCR", "ocr"), ("colour", "color"), ("verifier", "verifier")):
        gained = [float(gains(study, entry, reward).iloc[0]) for entry in entries]
        cells = [f"{gain:+.3f}".replace("-", "−") for gain in gained]
        if reward == "ocr":
            assert gained[-1] > 0 and taken == rates[-1] / 2
            cells[rates.index(taken)] = f"**{cells[rates.index(taken)]}**"
        assert f"| {label} | {' | '.join(cells)} |" in FINDINGS


SEEN_ON_WORDS = ("color", "letters", "clip_score", "hps", "pickscore", "image_reward")


def test_runs_are_compared_at_equal_ocr():
    """Every entry of `words_equal` against OCR alone, where both have gained as much in OCR."""
    study = "words_equal"
    entries = params(study)["entries"]
    label = lambda method: entries[method]["label"]
    for method in params(study)["methods"]:
        gained = [f"{gains(study, method, judge).mean():+.3f}" for judge in SEEN_ON_WORDS]
        each = ", ".join(f"{gain:+.3f}" for gain in gains(study, method, "color"))
        row = f"| {label(method)} | {' | '.join(gained)} | {each} |"
        assert row.replace("-", "−") in FINDINGS
        if method == "ocr":
            continue
        level = f"{at_equal_ocr(method, 'verifier').level.mean():+.3f}"
        named = f"{label(method)} − {label('ocr')}{', primary' if method == 'ocr_kl' else ''}"
        cells = [named, level]
        for judge in ("verifier", "color"):
            apart = at_equal_ocr(method, judge).difference
            cells.append(written(apart, 0.95))
            if judge == "verifier":
                cells.append(f"{stats.ttest_1samp(apart, 0).pvalue:.2g}")
            cells += [f"{exact(apart):.2g}", f"{(apart > 0).sum()} of {len(apart)}"]
        assert f"| {' | '.join(cells)} |" in FINDINGS


def test_a_kl_keeps_what_training_on_ocr_alone_loses():
    """The primary comparison of `words_equal`, and how a run on OCR alone goes."""
    study, apart = "words_equal", primary("words_equal")
    assert exact(apart) < 0.05 and (apart > 0).all()
    for page in ("studies/words_equal/README.md", "docs/howto/choose.md", "studies/README.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert written(apart, 0.95) in text and f"exact p {exact(apart):.2g}" in text
    ends = gains(study, "ocr_kl", "verifier") - gains(study, "ocr", "verifier")
    assert f"the verifier with the KL is {ends.mean():+.3f} above OCR alone" in SENTENCES
    table = results(study)
    alone = table[(table.part == "training") & (table.method == "ocr")]
    held_out = alone.set_index("seed")[["heldout_ocr", "heldout_verifier", "heldout_color"]]
    gained = held_out - held_out.groupby("seed").transform("first")
    measured = {base: of_base.to_numpy() for base, of_base in gained.groupby("seed")}
    assert alone.iteration.iloc[1] == 27 and all(
        (each[1, :2] < 0).all() for each in measured.values()
    )
    middle = [each[:5, 2].min() < 0.7 * each[:, 2].min() for each in measured.values()]
    assert sum(middle) >= 5 and sum(each[-1, 2] > -0.01 for each in measured.values()) == 1
