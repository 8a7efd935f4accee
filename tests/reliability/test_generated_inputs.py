"""Generated and damaged inputs: whatever they are, reading succeeds or ends in one line.

The functions that the stages call never raise another exception than a UserError of one line, and
repair nothing silently. A small draw runs at every commit, the long one (`slow`) has thousands.
"""

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from g2rpo_core.config import Profile, load_profile
from g2rpo_core.data.embeddings import Conditioning
from g2rpo_core.data.prompts import Prompt, normalized, read_prompts
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaints
from g2rpo_core.foundation.texts import steering
from tests.conftest import ROOT

FEW, MANY = 12, 220  # inputs of each kind, at every commit and in the slow tier
FIXED = {"derandomize": True, "database": None, "deadline": None}
FIXED |= {"phases": [Phase.generate, Phase.shrink], "suppress_health_check": list(HealthCheck)}


@pytest.fixture(params=[FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def drawn(request) -> Callable[..., None]:
    """drawn(check, strategy, ...): call `check` with so many draws of the strategies."""

    def run(check: Callable[..., None], *strategies: st.SearchStrategy) -> None:
        settings(max_examples=request.param, **FIXED)(given(*strategies)(check))()

    return run


def read_or_none(read: Callable[[], object]) -> object | None:
    """What `read` returns; None if it raised a UserError, of one line that says what is wrong."""
    try:
        return read()
    except UserError as error:
        text = str(error)
        assert "\n" not in text and len(text) > 10 and not steering(text), text
        return None


ODD = ["", " ", "\0", "\x1b[31m", "\u202e", "../x", "a|b", "<script>", "é", "e\u0301"]
texts = st.one_of(st.text(max_size=40), st.sampled_from([*ODD, "null", "1e400", "9" * 40]))
numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 10**30, 2**64, 1e400, -0.0, 1e-320, float("nan")]),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
data = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
TINY = YAML(typ="safe", pure=True).load((ROOT / "profiles" / "tiny.yaml").read_text())


def places(value: object, at: tuple = ()) -> Iterator[tuple]:
    """The keys of every value of nested data."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


def changed(place: tuple, value: object, remove: bool) -> dict:
    """The profile tiny with another value at a place, or without it."""
    copy = deepcopy(TINY)
    inner = reduce(getitem, place[:-1], copy)
    inner[place[-1]] = value
    if remove:
        del inner[place[-1]]
    return copy


def check_profile(profile: Profile) -> None:
    """Whatever was accepted can be run: its trees can be built, its numbers are finite."""
    assert not complaints(json.loads(profile.model_dump_json()))
    for run in map(profile.run, profile.methods):
        if run.sampling.steps <= 50:
            run.method.tree.build(run.sampling.steps, 0, 1).widths(run.training.num_generations)
        assert any(run.training.rewards.values()) and 0 < run.training.learning_rate <= 1


JSONS = [None, 1, [], {}, "x", [[]], {"a": {}}, {"stages": 1}]
# What becomes of real content, damaged at a place
DAMAGES = {
    "empty": lambda content, at, rng: b"",
    "cut": lambda content, at, rng: content[:at],
    "flipped": lambda content, at, rng: (
        content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    ),
    "zeros": lambda content, at, rng: (
        content[:at] + bytes(rng.randrange(1, 64)) + content[at + 64 :]
    ),
    "random": lambda content, at, rng: rng.randbytes(rng.randrange(1, 4096)),
    "doubled": lambda content, at, rng: content + content,
    "inserted": lambda content, at, rng: (
        content[:at] + rng.randbytes(rng.randrange(1, 9)) + content[at:]
    ),
    "json": lambda content, at, rng: json.dumps(rng.choice(JSONS)).encode(),
}
damages = st.tuples(st.sampled_from(list(DAMAGES)), st.integers(0, 2**32 - 1))


def damage(source: Path, target: Path, how: tuple[str, int]) -> None:
    """`source` as `target`, damaged."""
    content, rng = source.read_bytes(), random.Random(how[1])
    target.unlink()  # it may be a link
    target.write_bytes(DAMAGES[how[0]](content, rng.randrange(len(content)), rng))


def test_profiles_with_another_value_somewhere(drawn, tmp_path):
    path, yaml = tmp_path / "mine.yaml", YAML(typ="safe", pure=True)

    def check(place: tuple, value: object, remove: bool) -> None:
        yaml.dump(changed(place, value, remove), path)
        if profile := read_or_none(lambda: load_profile(path)):
            check_profile(profile)

    drawn(check, st.sampled_from(list(places(TINY))), data, st.booleans())


def test_prompts_of_any_bytes(drawn, tmp_path):
    def check(suffix: str, content: bytes) -> None:
        path = tmp_path / f"mine{suffix}"
        path.write_bytes(content)
        if (prompts := read_or_none(lambda: read_prompts(path))) is not None:
            texts = [prompt.text for prompt in prompts]
            assert texts and len(set(texts)) == len({prompt.id for prompt in prompts}) == len(texts)
            assert all(text == normalized(text) != "" and "\0" not in text for text in texts)

    suffixes = st.sampled_from([".txt", ".csv", ".jsonl", ".parquet"])
    drawn(check, suffixes, st.binary(max_size=400))


def encoded(prompts: list[Prompt]) -> Iterator[tuple[Prompt, Conditioning]]:
    for number, prompt in enumerate(prompts):
        context = torch.full((2, 3), float(number))
        yield prompt, Conditioning({"context": context, "pooled": torch.full((4,), float(number))})
