"""Portable numerics: the same functions, in every process that asks for them."""

import math
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from g2rpo_core.numerics import pins, portable, probe
from g2rpo_core.numerics.pins import PINS
from tests.conftest import ROOT
from tests.fixtures.errors import refused

WITHOUT_PINS = {name: value for name, value in os.environ.items() if name not in PINS}


def random(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return process("-c", code, folder=ROOT, **environment)


def process(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Python in a process without the pins."""
    found = WITHOUT_PINS | {"PYTHONPATH": f"{folder}:{ROOT}"} | environment
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=found, capture_output=True, text=True
    )


def by_hand(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_those_of_a_sum_by_hand(dtype):
    a, b, c = random(5, 7, dtype=dtype), random(7, 3, dtype=dtype), random(5, 3, dtype=dtype)
    torch.testing.assert_close(a @ b, by_hand(a, b))
    torch.testing.assert_close(
        a @ random(3, 7, dtype=dtype).T, by_hand(a, random(3, 7, dtype=dtype).T)
    )
    torch.testing.assert_close(
        torch.addmm(c, a, b, beta=0.5, alpha=2.0), 0.5 * c + 2 * by_hand(a, b)
    )
    torch.testing.assert_close(torch.addmm(c[0], a, b), c[0] + by_hand(a, b))
    many, others = random(4, 5, 7, dtype=dtype), random(4, 7, 3, dtype=dtype)
    torch.testing.assert_close(torch.bmm(many, others), by_hand(many, others))
    torch.testing.assert_close(
        torch.baddbmm(c, many, others, beta=2.0), 2 * c + by_hand(many, others)
    )


def test_a_beta_of_zero_ignores_what_it_multiplies():
    nothing = torch.full((2, 2), float("nan"))
    assert torch.addmm(nothing, torch.eye(2), torch.eye(2), beta=0).equal(torch.eye(2))


def test_products_of_nothing_and_of_other_dtypes_are_still_torchs():
    assert (torch.ones(0, 3) @ torch.ones(3, 2)).shape == (0, 2)
    assert (torch.ones(2, 0) @ torch.ones(0, 2)).equal(torch.zeros(2, 2))
    assert (
        torch.ones(2, 3, dtype=torch.int64) @ torch.ones(3, 2, dtype=torch.int64)
    ).dtype == torch.int64
    assert (
        torch.ones(2, 3, dtype=torch.bfloat16) @ torch.ones(3, 2, dtype=torch.bfloat16)
    ).dtype == torch.bfloat16
    with pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(3, 2, dtype=torch.float64)


def test_gradients_are_those_of_finite_differences():
    a, b, c = (each.requires_grad_() for each in (random(3, 4), random(4, 2), random(3, 2)))
    assert torch.autograd.gradcheck(lambda a, b, c: torch.addmm(c, a, b), (a, b, c))
    assert torch.autograd.gradcheck(lambda a: (a.square() + 1).sqrt(), (a,))


@pytest.mark.filterwarnings("error")
def test_what_overflows_is_inf_or_nan_and_no_warning():
    large = torch.full((2, 2), 1e38)
    assert (large @ large).isinf().all() and (large * 100 @ torch.zeros(2, 2)).isnan().all()


def test_square_roots_are_the_nearest_numbers():
    x = random(1003).abs().float()
    exact = x.double().numpy() ** 0.5
    assert x.sqrt().equal(torch.from_numpy(exact).float())
    assert x.clone().sqrt_().equal(x.sqrt()) and x.view(17, 59).T.sqrt().equal(
        x.sqrt().view(17, 59).T
    )
    assert torch.tensor([-1.0]).sqrt().isnan().all() and torch.tensor([4]).sqrt().equal(
        torch.tensor([2.0])
    )


def test_logarithms_of_float64_are_numpys_which_all_processors_share():
    x = random(100_002).abs()
    exact = torch.from_numpy(np.log(x.numpy()))
    assert (
        x.log().equal(exact)
        and x.clone().log_().equal(exact)
        and x.view(6, -1)[:, ::2].log().equal(exact.view(6, -1)[:, ::2])
    )
    assert (
        torch.tensor([-1.0, 0.0]).double().log()[0].isnan()
        and torch.zeros(1).double().log().item() == -math.inf
    )
    assert x.float().log().dtype == torch.float32 and torch.autograd.gradcheck(
        torch.log, (random(5).abs().requires_grad_(),)
    )


def test_this_processor_computes_the_committed_bits():
    assert (
        probe.check_machine()
        == f"portable numerics: this machine computes the committed bits (probe {probe.COMMITTED})"
    )


def test_without_the_pins_it_computes_others():
    code = "from g2rpo_core.numerics import probe; print(probe.fingerprint())"
    assert len(found := python(code).stdout.strip()) == 16 and found != probe.COMMITTED


def test_the_true_sizes_have_the_same_operations():
    count = lambda sizes: len(dict(probe.operations(sizes)))
    assert count(probe.SMALL) == count(probe.TRUE) >= 45


REPORT = (
    "import atexit, sys\n@atexit.register\ndef report():\n    import torch\n"
    "    from g2rpo_core.numerics.portable import in_use\n"
)
REPORT += (
    "    print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), in_use(), "
    "flush=True)\n"
)


@pytest.mark.parametrize(
    "command", [["-m", "stages.prompts", "--profile", "tiny"], ["-m", "g2rpo_core.cli", "probe"]]
)
def test_a_process_of_a_portable_profile_computes_so_whatever_its_environment(tmp_path, command):
    for name in ("profiles", "params.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "sitecustomize.py").write_text(REPORT)
    done = process(*command, folder=tmp_path, OMP_NUM_THREADS="2", MKL_CBWR="AVX2")
    assert done.stdout.splitlines()[-1] == "AVX2 1 portable", done.stderr


def test_a_process_of_a_native_profile_is_left_alone(tmp_path):
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    (tmp_path / "profiles" / "mine.yaml").write_text("extends: tiny\nnumerics: native\n")
    (tmp_path / "sitecustomize.py").write_text(REPORT)
    words = ["-m", "stages.prompts", "--profile", "mine"]
    done = process(*words, folder=tmp_path, OMP_NUM_THREADS="2")
    assert done.stdout.splitlines()[-1].split()[1:] == ["2", "native"], done.stderr


def test_portable_numerics_that_come_too_late_are_refused():
    code = "import torch; from g2rpo_core.numerics import portable; portable.use('portable')"
    assert (
        "numerics: portable has to be set before torch is imported: "
        "export ATEN_CPU_CAPABILITY=avx2 " in python(code).stderr
    )


@pytest.mark.parametrize(
    "machine, flags, problem",
    [
        ("aarch64", "asimd", "needs an x86-64 processor (this is aarch64)"),
        (
            "x86_64",
            "sse4_2 avx",
            "needs a processor with AVX2 and FMA (this one is not known to have avx2 and fma)",
        ),
        ("x86_64", "avx2 fma", None),
    ],
)
def test_a_processor_that_cannot_is_refused_in_one_line(monkeypatch, machine, flags, problem):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(pins, "read_processor", lambda: {"flags": flags})
    assert pins.processor_problem() == problem
    if problem:
        told = f"numerics: portable {problem}: set numerics: native in the profile; "
        with refused(f"^{re.escape(told)}its results have other bits$"):
            portable.use("portable")


def test_a_profile_that_cannot_be_read_is_left_to_its_reader(here):
    for name in (None, "missing", "../outside"):
        pins.pin_profile(name)


UPDATE = """
import hashlib, os
import torch
from g2rpo_core.architectures.flux import Flux
from g2rpo_core.numerics.portable import in_use, use
from benchmarks.flux import SIZES
from diffusers import FluxTransformer2DModel
use(os.environ["ASKED"])
torch.manual_seed(0)
config = SIZES["tiny"][0] | {"joint_attention_dim": 32, "pooled_projection_dim": 16}
model = FluxTransformer2DModel(**config)
inputs = Flux().inputs(config, 2, 16, 8, "cpu")
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for _ in range(2):
    model(**inputs)[0].square().mean().backward()
    optimizer.step()
weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
print(in_use(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.cuda.is_initialized(), digest)
"""


@pytest.mark.pipeline
def test_deterministic_numerics_are_set_before_cuda_and_keep_the_bits_of_a_cpu():
    asked = ("native", "deterministic")
    native, deterministic = (
        python(UPDATE, ASKED=each, OMP_NUM_THREADS="1").stdout.split() for each in asked
    )
    assert native[:3] == ["native", "None", "False"] and deterministic[:3] == [
        "deterministic",
        ":4096:8",
        "False",
    ]
    assert native[3] == deterministic[3]
