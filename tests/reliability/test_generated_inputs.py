"""Generated and damaged inputs: whatever they are, reading succeeds or ends in one line.

The functions that the stages call never raise another exception than a UserError of one line, and
repair nothing silently. A small draw runs at every commit, the long one (`slow`) has thousands.
"""

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from g2rpo_core.config import Profile, load_profile
from g2rpo_core.data.embeddings import Conditioning, EmbeddingStore, write
from g2rpo_core.data.prompts import Prompt, normalized, read_prompts
from g2rpo_core.distributed import checkpoint
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.files import complaints
from g2rpo_core.foundation.texts import steering
from tests.conftest import ROOT

FEW, MANY = 12, 220  # inputs of each kind, at every commit and in the slow tier
FIXED = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "phases": [Phase.generate, Phase.shrink],
}
HEALTH = [
    HealthCheck.too_slow,
    HealthCheck.function_scoped_fixture,
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
]


def draws(*strategies: st.SearchStrategy) -> Callable:
    """The test at every commit with FEW inputs, and as a slow one with MANY."""

    def decorate(test: Callable) -> Callable:
        def both(self, tmp_path, many):
            count = MANY if many else FEW
            check = settings(max_examples=count, suppress_health_check=HEALTH, **FIXED)(
                lambda drawn: test(self, tmp_path, *drawn)
            )
            given(st.tuples(*strategies))(check)()

        both.__name__ = test.__name__
        return pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])(
            both
        )

    return decorate


def read_or_none(read: Callable[[], object]) -> object | None:
    """What `read` returns; None if it raised a UserError, of one line that says what is wrong."""
    try:
        return read()
    except UserError as error:
        text = str(error)
        assert "\n" not in text and len(text) > 10 and not steering(text), text
        return None


ODD = ["", " ", "\0", "\x1b[31m", "\u202e", "../x", "a|b", "<script>", "é", "e\u0301", "\ud800"]
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


def places(value: object, at: tuple = ()) -> list[tuple]:
    """The keys of every value of nested data."""
    found = [at] if at else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return found + [place for key, inner in items for place in places(inner, (*at, key))]


PLACES = places(TINY)


def changed(place: tuple, value: object, remove: bool) -> dict:
    """The profile tiny with another value at a place, or without it."""
    copy = json.loads(json.dumps(TINY))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    if remove:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return copy


def dumped(value: object) -> bytes:
    """As YAML, or as JSON with its escapes where YAML has no form (half a surrogate pair)."""
    file = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.allow_unicode = True
    try:
        yaml.dump(value, file)
        return file.getvalue().encode()
    except (YAMLError, ValueError):  # what YAML has no form for
        return json.dumps(value).encode()


def check_profile(profile: Profile) -> None:
    """Whatever was accepted can be run: its trees can be built, its numbers are finite."""
    assert not complaints(json.loads(profile.model_dump_json()))
    for name in profile.methods:
        steps = profile.run(name).sampling.steps
        method, training = profile.run(name).method, profile.run(name).training
        if steps <= 50:
            method.tree.build(steps, 0, 1).widths(training.num_generations)
        assert any(training.rewards.values()) and 0 < training.learning_rate <= 1


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


def damage(source: Path, target: Path, how: tuple[str, int]) -> Path:
    """`source` as `target`, damaged."""
    content, (kind, seed) = source.read_bytes(), how
    rng = random.Random(seed)
    target.unlink(missing_ok=True)
    target.write_bytes(DAMAGES[kind](content, rng.randrange(len(content)), rng))
    return target


class TestSettings:
    @draws(st.sampled_from(PLACES), data, st.booleans())
    def test_profiles_with_another_value_somewhere(self, folder, place, value, remove):
        path = folder / "mine.yaml"
        path.write_bytes(dumped(changed(place, value, remove)))
        if profile := read_or_none(lambda: load_profile(path)):
            check_profile(profile)


rows = st.one_of(
    data, st.fixed_dictionaries({"prompt": texts | data}, optional={"style": texts | data})
)


class TestPrompts:
    @staticmethod
    def check(prompts: list[Prompt] | None) -> None:
        if prompts is not None:
            assert prompts and len({prompt.text for prompt in prompts}) == len(prompts) == len(
                {prompt.id for prompt in prompts}
            )
            assert all(
                prompt.text == normalized(prompt.text) != "" and "\0" not in prompt.text
                for prompt in prompts
            )

    @draws(st.sampled_from([".txt", ".csv", ".jsonl", ".parquet"]), st.binary(max_size=400))
    def test_files_that_are_any_bytes(self, folder, suffix, content):
        path = folder / f"mine{suffix}"
        path.write_bytes(content)
        self.check(read_or_none(lambda: read_prompts(path)))


def encoded(prompts):
    for number, prompt in enumerate(prompts):
        yield (
            prompt,
            Conditioning(
                {
                    "context": torch.full((2, 3), float(number)),
                    "pooled": torch.full((4,), float(number)),
                }
            ),
        )


class TestStores:
    @draws(damages, st.sampled_from(["part-00000.parquet", "part-00001.parquet"]))
    def test_damaged_embeddings(self, folder, how, part):
        whole = folder / "whole"
        if not whole.exists():
            write(
                whole, [Prompt(f"p-{n}", f"a cat {n}", "") for n in range(9)], encoded, "float32", 5
            )
        shutil.rmtree(folder / "store", ignore_errors=True)
        shutil.copytree(whole, folder / "store")
        damage(whole / part, folder / "store" / part, how)
        store = read_or_none(lambda: EmbeddingStore(folder / "store"))
        found = read_or_none(lambda: store.conditioning(range(len(store)))) if store else None
        assert found is None or (
            found.tensors["context"].isfinite().all()
            and found.tensors["context"].shape[1:] == (2, 3)
        )

    @draws(damages, st.sampled_from(["manifest.json", "records.json", ".metadata", "__0_0.distcp"]))
    def test_damaged_checkpoints(self, folder, how, name):
        if not (folder / "whole").exists():
            kept = checkpoint.Checkpoints(folder, 1)
            kept.save(3, {"weights": {"one": torch.ones(9, 3)}}, [{"iteration": 3}])
            kept.finish()
            checkpoint.checkpoints(folder)[0].rename(folder / "whole")
        path = folder / "iteration-000003"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder / "whole", path)
        damage(folder / "whole" / name, path / name, how)
        state = {"weights": {"one": torch.zeros(9, 3)}}
        if read_or_none(lambda: checkpoint.load_records(path)) is not None:
            read_or_none(lambda: checkpoint.load_state(path, state))
            if name != "manifest.json":  # it says itself what the others are
                assert (path / name).read_bytes() == (folder / "whole" / name).read_bytes()
