import re

from g2rpo_core.reporting.conclusions import headline
from g2rpo_core.reporting.render import render
from tests.conftest import ROOT
from tests.reporting.test_recorded import committed_page

INTERVAL = re.compile(r"[+-]\d+\.\d{4} \[[+-]\d+\.\d{4}, [+-]\d+\.\d{4}\]")


def test_every_interval_of_a_page_is_a_comparison_and_each_has_one_name(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = committed_page("verdict")
    means = headline(page)
    entries = means.pop("comparisons")
    shown = set(INTERVAL.findall(render(page)["report.md"]))
    assert len(shown) > 10
    assert shown <= {
        f"{one['difference']:+.4f} [{one['low']:+.4f}, {one['high']:+.4f}]" for one in entries
    }
    keys = [(one["of"], one["against"], one["reward"], one.get("on")) for one in entries]
    assert len(set(keys)) == len(keys)
    beforehand = [one for one in entries if "margin" in one]
    assert [(one["of"], one["against"], one["reward"], one["margin"]) for one in beforehand] == [
        (one.method, one.against, one.reward, one.margin) for one in page.compared.comparisons
    ]
    # The first table: every mean, and the gain in the training reward
    rewards = list(page.compared.settings.evaluation.rewards)
    assert list(means.pop("base-0")) == rewards and len(means) == len(page.compared.runs)
    trained = {
        one["of"]: one
        for one in entries
        if one["reward"] == "training" and one["against"] == "base-0" and "on" not in one
    }
    for run, numbers in means.items():
        gain, errors = (numbers[key] for key in numbers if key not in rewards)
        assert (
            gain == trained[run]["difference"]
            and abs(errors) > 0
            and len(numbers) == len(rewards) + 2
        )
