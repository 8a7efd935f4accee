"""Portable numerics: the same functions, in every process that asks for them."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from g2rpo_core.numerics import pins, portable
from g2rpo_core.numerics.pins import PINS
from tests.conftest import ROOT
from tests.fixtures.errors import refused

WITHOUT_PINS = {name: value for name, value in os.environ.items() if name not in PINS}


def random(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


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
    near, product = torch.testing.assert_close, by_hand(a, b)
    near(a @ b, product)
    near(a @ random(3, 7, dtype=dtype).T, by_hand(a, random(3, 7, dtype=dtype).T))
    near(torch.addmm(c, a, b, beta=0.5, alpha=2.0), 0.5 * c + 2 * product)
    near(torch.addmm(c[0], a, b), c[0] + product)
    many, others = random(4, 5, 7, dtype=dtype), random(4, 7, 3, dtype=dtype)
    near(torch.bmm(many, others), by_hand(many, others))
    near(torch.baddbmm(c, many, others, beta=2.0), 2 * c + by_hand(many, others))
    # A beta of 0 ignores what it multiplies
    near(torch.addmm(c * float("nan"), a, b, beta=0), product)


@pytest.mark.filterwarnings("error")
def test_products_of_nothing_of_other_dtypes_and_of_large_numbers_are_still_torchs():
    assert (torch.ones(2, 0) @ torch.ones(0, 2)).equal(torch.zeros(2, 2))
    for dtype in (torch.int64, torch.bfloat16):
        assert (torch.ones(2, 3, dtype=dtype) @ torch.ones(3, 2, dtype=dtype)).dtype == dtype
    large = torch.full((2, 2), 1e38)
    assert (large @ large).isinf().all() and (large * 100 @ torch.zeros(2, 2)).isnan().all()


def test_gradients_are_those_of_finite_differences():
    a, b, c = (each.requires_grad_() for each in (random(3, 4), random(4, 2), random(3, 2)))
    assert torch.autograd.gradcheck(lambda a, b, c: torch.addmm(c, a, b), (a, b, c))
    assert torch.autograd.gradcheck(lambda a: (a.square() + 1).sqrt(), (a,))
    assert torch.autograd.gradcheck(torch.log, (random(5).abs().requires_grad_(),))


def test_square_roots_are_the_nearest_numbers():
    x = random(1003).abs().float()
    assert x.sqrt().equal(torch.from_numpy(x.double().numpy() ** 0.5).float())
    assert x.clone().sqrt_().equal(x.sqrt())
    assert x.view(17, 59).T.sqrt().equal(x.sqrt().view(17, 59).T)


def test_logarithms_of_float64_are_numpys_which_all_processors_share():
    x = random(100_002).abs()
    exact = torch.from_numpy(np.log(x.numpy()))
    assert x.log().equal(exact) and x.clone().log_().equal(exact)
    assert x.view(6, -1)[:, ::2].log().equal(exact.view(6, -1)[:, ::2])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draw float32 values in [-2, 2), the same everywhere: they are made of whole numbers."""
    values = np.random.Generator(np.random.PCG64(seed + sum(shape)))
    drawn = values.integers(-(2**24), 2**24, shape)
    return torch.from_numpy((drawn / 2**23).astype(np.float32))


def with_gradients(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [each.clone().requires_grad_() for each in inputs]
    result = function(*leaves)
    result.backward(draw(*result.shape, seed=99))
    return [result, *(leaf.grad for leaf in leaves)]


def every_way(function, x: torch.Tensor) -> list[torch.Tensor]:
    return [*with_gradients(function, x), function(x.T), function(x.double())]


def steps_of_adamw() -> list[torch.Tensor]:
    weights = [torch.nn.Parameter(draw(*shape, seed=4)) for shape in ((128, 128), (128,), (7,))]
    optimizer = torch.optim.AdamW(weights, 1e-3, weight_decay=0.01, fused=False)
    for step in range(3):
        for weight in weights:
            weight.grad = draw(*weight.shape, seed=10 + step)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    return weights


POSITIVE = draw(33, 112).abs() + 0.1
COMPUTED = {  # with the hash of it on every processor, at the versions of requirements.lock
    "9cfd620a91414c45": partial(
        with_gradients, F.linear, draw(112, 128), draw(512, 128), draw(512)
    ),
    "d0ff9f4c26c35bc3": lambda: [torch.bmm(draw(8, 28, 32), draw(8, 32, 28))],
    "bf9349b301f07416": partial(
        with_gradients,
        partial(F.conv2d, padding=1),
        draw(2, 32, 16, 16),
        draw(32, 32, 3, 3, seed=1),
        draw(32, seed=2),
    ),
    "6d2cf79066558309": partial(
        with_gradients,
        F.scaled_dot_product_attention,
        *(draw(2, 4, 28, 32, seed=seed) for seed in (1, 2, 3)),
    ),
    "43e108b45e695e2e": partial(
        with_gradients,
        lambda x, w, b: F.group_norm(x, 8, w, b, 1e-6),
        draw(2, 32, 16, 16),
        draw(32),
        draw(32, seed=1),
    ),
    "eadab7b0d8de2b5b": partial(every_way, torch.sqrt, POSITIVE),
    "246096a800854e7e": partial(every_way, torch.log, POSITIVE),
    "f8370959ab836f37": partial(every_way, partial(torch.pow, exponent=1.7), POSITIVE),
    "386be4f995b0b10e": steps_of_adamw,
}


@pytest.mark.parametrize("committed", COMPUTED)
def test_this_processor_computes_the_committed_bits(committed):
    computed = COMPUTED[committed]()
    array = b"".join(each.detach().contiguous().numpy().tobytes() for each in computed)
    assert hashlib.sha256(array).hexdigest()[:16] == committed


REPORT = """
import atexit
@atexit.register
def report():
    import torch
    from g2rpo_core.numerics.portable import in_use
    print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), in_use(), flush=True)
"""


@pytest.mark.parametrize(
    "words, told",
    [
        (["-m", "stages.prompts", "--profile", "tiny"], ["AVX2", "1", "portable"]),
        (["-m", "stages.prompts", "--profile", "mine"], ["2", "native"]),
    ],
)
def test_a_process_computes_as_its_profile_says_whatever_its_environment(tmp_path, words, told):
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    (tmp_path / "params.yaml").symlink_to(ROOT / "params.yaml")
    (tmp_path / "profiles" / "mine.yaml").write_text("extends: tiny\nnumerics: native\n")
    (tmp_path / "sitecustomize.py").write_text(REPORT)
    done = process(*words, folder=tmp_path, OMP_NUM_THREADS="2", MKL_CBWR="AVX2")
    assert done.stdout.splitlines()[-1].split()[-len(told) :] == told, done.stderr


def test_portable_numerics_that_come_too_late_are_refused():
    code = "import torch; from g2rpo_core.numerics import portable; portable.use('portable')"
    said = "numerics: portable has to be set before torch is imported: export ATEN_CPU_CAPABILITY="
    assert said in process("-c", code, folder=ROOT).stderr


@pytest.mark.parametrize(
    "machine, flags, problem",
    [
        ("aarch64", "asimd", "needs an x86-64 processor (this is aarch64)"),
        (
            "x86_64",
            "sse4_2 avx",
            "needs a processor with AVX2 and FMA (this one is not known to have avx2 and fma)",
        ),
    ],
)
def test_a_processor_that_cannot_is_refused_in_one_line(monkeypatch, machine, flags, problem):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(pins, "read_processor", lambda: {"flags": flags})
    told = f"numerics: portable {problem}: set numerics: native in the profile; "
    with refused(f"^{re.escape(told)}its results have other bits$"):
        portable.use("portable")


UPDATE = """
import hashlib, os
import torch
from g2rpo_core.numerics.portable import in_use, use
use(os.environ["ASKED"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for _ in range(2):
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
print(in_use(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.cuda.is_initialized(), digest)
"""


@pytest.mark.pipeline
def test_deterministic_numerics_are_set_before_cuda_and_keep_the_bits_of_a_cpu():
    native, deterministic = (
        process("-c", UPDATE, folder=ROOT, ASKED=each, OMP_NUM_THREADS="1").stdout.split()
        for each in ("native", "deterministic")
    )
    assert native[:3] == ["native", "None", "False"]
    assert deterministic[:3] == ["deterministic", ":4096:8", "False"]
    assert native[3] == deterministic[3]
