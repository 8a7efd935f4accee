"""`make vouch`: code with the same bits keeps its version."""

import pytest
from ruamel.yaml import YAML

from stages.versions import STAGES, VOUCHED
from tools.vouch import CONSTANTS, parts, run_parts

SOURCE = '''
"""Docstring."""
from math import exp as grow
class Mean:
    def of(self, values: list) -> float:
        def weight(value): return {}
        return sum(map(weight, values))
async def left(): return lambda: 1
LIMIT = {}
'''


def test_parts_are_named_as_code_objects_and_differ_by_what_decides():
    found, space = dict(parts(SOURCE.format("value", 1))), {}
    exec(compile(SOURCE.format("value", 1), "source", "exec"), space)  # noqa: S102
    of = space["Mean"].of.__code__
    inner = next(const for const in of.co_consts if hasattr(const, "co_qualname"))
    codes = {code.co_qualname for code in (of, inner, space["left"].__code__)}
    assert found.keys() == {*codes, CONSTANTS, f"Mean.{CONSTANTS}", "import grow"}
    assert found == dict(parts(SOURCE.format("value  # as it is", "(1)")))
    after = dict(parts(SOURCE.format("2 * value", 2)))
    changed = {name for name in found if found[name] != after[name]}
    assert changed == {of.co_qualname, inner.co_qualname, CONSTANTS}


@pytest.mark.pipeline
@pytest.mark.slow
def test_the_small_pipeline_has_the_bits_of_the_versions():
    """Of every stage, on any machine; where profiles or packages changed: make vouch BASELINE=1."""
    outputs, ran = run_parts()
    table = YAML(typ="safe").load(VOUCHED.read_text())
    assert outputs == {stage: table[stage]["outputs"] for stage in STAGES}
    assert {
        ("g2rpo_core/algorithm/loss.py", "clipped_loss"),
        ("g2rpo_core/architectures/zimage.py", "ZImage.guided"),
        ("g2rpo_core/weights/stored.py", "choose"),
    } <= ran
