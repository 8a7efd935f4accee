"""Transformers of random weights: their shapes, and the memory that drawing them takes."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from g2rpo_core.estimate import tracing
from g2rpo_core.estimate.drawn import drawn_transformer
from g2rpo_core.models.quantized import QuantizedLinear
from g2rpo_core.models.settings import LoraSettings
from tests.conftest import ROOT
from tests.estimate.test_plan import SMALLS
from tests.fixtures.commands import run_module

CPU = torch.device("cpu")
LORA = LoraSettings(rank=4, alpha=8.0)
# A card of 24 GB has 23.5 GiB, of which CUDA itself takes some
WITHIN = """
import json, sys
from pathlib import Path
from pipeline.rehearsal import stub
stub.load(stub.build(Path(".cache", "rehearsal")))
from pipeline.rehearsal import simulate
from pipeline.rehearsal.meter import GIB, Meter
from g2rpo_core.config import load_profile
from g2rpo_core.estimate.plan import measured_rate
simulate.gpus(1, 0, 23.5)
peaks = {}
for name in sys.argv[1:]:
    meter = Meter(22 * GIB, 1)
    with simulate.WithoutData(), meter:
        assert measured_rate(load_profile(Path("profiles", f"{name}.yaml")), "g2rpo") > 0
    peaks[name] = meter.phases["start"].peak["cuda"] / GIB
print(json.dumps(peaks))
"""


@pytest.fixture
def empty_memory_is_nan(monkeypatch):
    """Else it mostly holds zeros or small numbers, and a tensor left out is seen by luck."""
    before = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@SMALLS
@pytest.mark.parametrize("quantized", [None, "int8", "nf4"])
@pytest.mark.usefixtures("empty_memory_is_nan")
def test_it_is_the_published_class_in_bfloat16_and_computes(base, small, quantized):
    with torch.device("meta"):
        plain = {
            name: tensor.shape for name, tensor in base.transformer(**small).named_parameters()
        }
    drawn = drawn_transformer(base, small, CPU, LORA, quantized)
    found = {
        name.replace(".base_layer", ""): each
        for name, each in drawn.named_parameters()
        if ".lora_" not in name
    }
    assert plain.keys() <= found.keys() and not any(
        parameter.is_meta for parameter in drawn.parameters()
    )
    layers = [module for module in drawn.modules() if isinstance(module, QuantizedLinear)]
    assert bool(layers) == bool(quantized)
    if not quantized:
        assert {name: parameter.shape for name, parameter in found.items()} == plain
        assert {parameter.dtype for parameter in found.values()} == {torch.bfloat16}
    trained = {
        name: parameter.dtype
        for name, parameter in drawn.named_parameters()
        if parameter.requires_grad
    }
    assert trained and all(
        ".lora_" in name and dtype == torch.float32 for name, dtype in trained.items()
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert all(
            torch.isfinite(out).all() for out in drawn(**base.inputs(small, 2, 16, 8, "cpu"))[0]
        )


@SMALLS
@pytest.mark.parametrize("quantized", [None, "nf4"])
def test_blocks_that_share_weights_make_the_same_call_with_fewer_of_them(base, small, quantized):
    """The operations are counted, on both: a rate does not depend on which weights are read."""
    counts, numels = [], []
    for shared in (False, True):
        drawn = drawn_transformer(base, small, CPU, None, quantized, shared)
        seen = []

        class Operations(TorchDispatchMode):
            def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
                shapes = [tuple(each.shape) for each in args if isinstance(each, torch.Tensor)]
                seen.append((str(operation), shapes))  # noqa: B023
                return operation(*args, **(kwargs or {}))

        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Operations():
            drawn(**base.inputs(small, 2, 16, 8, "cpu"))
        counts.append(seen)
        numels.append(sum(parameter.numel() for parameter in drawn.parameters()))
    assert counts[0] == counts[1] and numels[1] < numels[0]


def test_a_rate_is_measured_in_calls_of_the_asked_size():
    base, small = SMALLS.args[1][0]
    assert 0 < tracing.measured_rate(base, small, 2, 16, 8, device="cpu", quantized="int8") < 60_000


@pytest.mark.slow
def test_every_base_model_is_measured_at_true_size_within_24_gb(tmp_path):
    """On a simulated GPU; Qwen-Image is the largest, the 24 GB profile is quantized."""
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    names = ["flux_lora_24gb", "qwen_image_hps_clip"]
    (tmp_path / "within.py").write_text(WITHIN)
    done = run_module("within", *names, folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    assert list(peaks) == names and all(1 < peak < 22 for peak in peaks.values())
