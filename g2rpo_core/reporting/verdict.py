"""Says what a report's numbers mean: its sentences, and the paper's numbers next to runs that had the paper's settings."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace

from ruamel.yaml import YAML

from g2rpo_core.foundation.runs import is_base
from g2rpo_core.reporting.tables import Gain, Pair, Row, Standing, Weights, tone

PAPER = YAML(typ="safe", pure=True).load(Path(__file__).with_name("paper.yaml").read_text())


def verdict(
    found: Sequence[Gain],
    ranked: Sequence[tuple[Mapping[str, float], list[Standing]]],
    pairs: list[Pair],
    labels: Mapping[str, str],
    rewards: Mapping[str, str],
    held_out: Sequence[str],
) -> str:
    """Return the result in a few sentences: who raised the training reward, who is ahead, and whether held-out rewards rose too.

    found: from `gains`; ranked: each training reward with the standings of its methods, which are empty below three seeds;
    rewards: names in reports.
    """
    trained = sorted((one for one in found if one.reward is None), key=lambda one: -one.by)
    if not trained:
        return "It is not known which rewards these weights were trained on."
    # Say who is ahead by single seeds, then who raised the training reward
    few = not any(standing for _, standing in ranked)
    sentences = [first_of_few(trained, pairs, labels)] if few and len(trained) > 1 else []
    every = " on every seed" if few and len(trained[0].seeds) > 1 else ""
    risen, rest = [one for one in trained if one.tone == "up"], [one for one in trained if one.tone != "up"]
    names = lambda some: ", ".join(f"{labels[one.method]} ({one.by:+.3f})" for one in some)
    if len(trained) == 1:
        verb = {"up": "raises", "down": "lowers", "": "does not significantly change"}[trained[0].tone]
        sentences += [
            f"{labels[trained[0].method]} {verb} the reward that it was trained on{every and f',{every}'} ({trained[0].by:+.3f})."
        ]
    elif not rest:
        several = "Both methods" if len(trained) == 2 else f"All {len(trained)} methods"
        listed = f": {names(risen)}" if len(risen) < 4 else ""
        sentences += [f"{several} raise the reward that they were trained on{every and f',{every}'}{listed}."]
    else:
        which = names(risen) if len(risen) == 1 else f"{len(risen) or 'None'} of {len(trained)} methods"
        verb = "raises" if len(risen) < 2 else "raise"
        others = f"; {'not so' if every else 'no significant rise'}: {names(rest)}" if len(rest) < 4 else ""
        sentences += [f"{which} significantly {verb} the training reward{every}{others}."]
    # Say who is ahead over seeds
    for weights, standing in ranked:
        if len(standing) > 1:
            on = f"Trained on {' + '.join(rewards[name] for name in weights)}, " if len(ranked) > 1 else ""
            below = [labels[other] for other, gained in standing[0].above.items() if tone(gained) == "up"]
            whom = " and ".join(below) if len(below) < 3 else f"{len(below)} of the {len(standing) - 1} others"
            ahead = f"and is significantly above {whom}" if below else "but is not significantly above any other"
            sentences.append(f"{on}{labels[standing[0].method]} gains most ({standing[0].gain.mean:+.3f}) {ahead}.")
    # Say what held-out rewards did
    other = [(rewards[one.reward], one) for one in found if one.reward is not None and one.reward in held_out]
    tones: dict[str, set[str]] = {}  # of each held-out reward, by all methods
    for reward, one in other:
        tones.setdefault(reward, set()).add(one.tone)
    always = [reward for reward, seen in tones.items() if seen == {"up"}]
    unsure = [reward for reward in tones if reward not in always]
    if fallen := [f"{reward} of {labels[one.method]}" for reward, one in other if one.tone == "down"]:
        sentences.append(f"Some held-out rewards fall: {', '.join(fallen[:4])}{', …' if len(fallen) > 4 else ''}.")
    elif always:
        not_always = f"; not always significantly: {', '.join(unsure)}" if unsure else ""
        sentences.append(f"Held-out rewards rise too: {', '.join(always)}{not_always}.")
    return " ".join(filter(None, sentences))


def first_of_few(trained: Sequence[Gain], pairs: list[Pair], labels: Mapping[str, str]) -> str:
    """Say how far the first method is before the second; it is ahead if it is so significantly on every seed; trained: the highest gain first.

    The text is empty if they do not share a training reward and a seed.
    """
    first, second = (one.method for one in trained[:2])
    sign = {(first, second): 1, (second, first): -1}
    found = [
        (sign[pair.first, pair.second], pair.difference)
        for pair in pairs
        if (pair.first, pair.second) in sign and not pair.reward
    ]
    if not found:
        return ""
    by = sum(each * difference.mean for each, difference in found) / len(found)
    clear = sum(tone(difference) == ("up" if each > 0 else "down") for each, difference in found)
    seeds = f"{clear or 'none'} of {len(found)} seeds" if len(found) > 1 else "its one seed"
    significant = "" if clear or len(found) > 1 else "not "
    next_one = labels[second] if len(trained) == 2 else f"the next, {labels[second]},"
    if clear == len(found):
        return f"{labels[first]} is ahead of {next_one} by {by:.3f}, significantly on {seeds}."
    return f"No lead is shown: {labels[first]} gains {by:.3f} more than {next_one.rstrip(',')}, {significant}significantly on {seeds}."


def summary(rows: list[Row], pairs: list[Pair], labels: Mapping[str, str], unit: str = "seed") -> list[str]:
    """Return sentences on the training reward: each method against the base, then the methods against each other; unit: what runs are numbered by."""
    against = [(labels[row.method], "the base", row.trained) for row in rows if row.trained]
    against += [(labels[pair.first], labels[pair.second], pair.difference) for pair in pairs if pair.reward is None]
    sentences = []
    for first, second in dict.fromkeys(entry[:2] for entry in against):
        seeds = [difference for *who, difference in against if who == [first, second]]
        tones = [tone(difference) for difference in seeds]
        words = {
            "up": f"significantly above {second}",
            "down": f"significantly below {second}",
            "": f"not significantly different from {second}",
        }
        verdict = ", ".join(f"{words[each]} with {tones.count(each)} of {len(tones)} {unit}s" for each in words if each in tones)
        interval = lambda each: f"[{each.low:+.3f}, {each.high:+.3f}]" if each.known else "[–]"
        values = ", ".join(f"{each.mean:+.3f} {interval(each)}" for each in seeds)
        sentences.append(f"{first} is {verdict}: {values}.")
    return sentences


def paper_rows(
    variants: list[tuple[str | int, int, list[Row]]], settings: SimpleNamespace, entries: Mapping, trained_on: Weights
) -> list[dict]:
    """Pair our runs with the paper's rows of the same method and training rewards; None where the paper has no number.

    Columns are those of `evaluation.rewards`. `unlike` lists the settings that are not the paper's; only if it is empty may the
    two be compared.
    """
    ours = set(settings.evaluation.steps) if len(settings.evaluation.steps) > 1 else set()
    named = {name for table in PAPER["tables"] for name in table["rows"]}
    lines = []
    for number, (_, steps, rows) in enumerate(variants):
        # The paper's table for our steps; the first variant also meets its main table, of 50 steps
        beside = {steps} & ours | ({50} - ours if number == 0 else set())
        tables = [table for table in PAPER["tables"] if table["steps"] in beside]
        for row, table in product(rows, tables):
            key = row.method if row.method in named or row.method not in entries else entries[row.method].published
            if key in table["rows"] and set(table["trained_on"]) == set(trained_on.get(row.method, {})):
                values = dict(zip(PAPER["rewards"], table["rows"][key]))
                pairs = [(row.cells[reward].mean, values.get(reward)) for reward in settings.evaluation.rewards]
                differing = unlike(settings, entries.get(row.method) if not is_base(row.method) else None)
                if table["steps"] != steps:
                    differing.append(f"evaluation.steps {steps} (the paper's {table['steps']})")
                lines.append(
                    {"table": f"{table['name']}, {table['steps']} steps", "row": row, "pairs": pairs, "unlike": differing}
                )
    return lines


def unlike(settings: SimpleNamespace, entry: SimpleNamespace | None) -> list[str]:
    """Return the settings of a run, or of the base (None), that are not the paper's: `training.iterations 200 (the paper's 300)`."""
    sections = {"models": settings.models, "prompts": settings.prompts, "evaluation": settings.evaluation}
    # How published weights were trained is not known here
    if entry and entry.training:
        sections |= {"sampling": entry.sampling, "training": entry.training}
    return [
        f"{section}.{key} {_shown(value)} (the paper's {_shown(theirs)})"
        for section, of_section in sections.items()
        for key, theirs in PAPER["settings"][section].items()
        if (value := getattr(of_section, key)) != theirs
    ]


def _shown(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:g}"
    return value if isinstance(value, str) else "none" if value is None else "set"
