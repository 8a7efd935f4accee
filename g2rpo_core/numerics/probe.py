"""Hashes operations of every kind used here: machines with equal hashes get equal results."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from g2rpo_core.foundation.texts import echo, reason
from g2rpo_core.numerics import portable
from g2rpo_core.numerics.pins import PINS, processor_problem

# `fingerprint` of portable numerics, on any processor, with the versions of requirements.lock
COMMITTED = "62a7868904bd78f7"


class Sizes(NamedTuple):
    """How large the operands are."""

    rows: int
    """Tokens of a batch."""
    batch: int
    """Images of a batch."""


SMALL = Sizes(112, 2)
# Those of a fit of profile `tiny`: 128 texts and images of 28 tokens, 16 images of 32 x 32 pixels
TRUE = Sizes(3584, 16)


def check_machine() -> str:
    """Say whether this machine computes the committed bits: the probe, pinned, in a new process."""
    if problem := processor_problem():
        return f"portable numerics: {problem}; results here have other bits than the committed ones"
    command = [sys.executable, "-m", "g2rpo_core.numerics.probe"]
    done = subprocess.run(command, env=os.environ | PINS, capture_output=True, text=True)
    found = done.stdout.strip() or f"failed: {reason(done.stderr)}"
    if found == COMMITTED:
        return f"portable numerics: this machine computes the committed bits (probe {found})"
    return (
        "portable numerics: this machine computes other bits than the committed ones (probe "
        f"{found}, not {COMMITTED}); compare the versions with requirements.lock"
    )


def describe_numerics() -> str:
    """Return this process's numerics for a report, with the probe's hash if they are portable."""
    return f"numerics {portable.in_use()}" + (
        f" (probe {fingerprint()})" if portable.in_use() == "portable" else ""
    )


def fingerprint() -> str:
    """Return one hash of all small operations, 16 hexadecimal digits; takes about a second."""
    return hashlib.sha256("".join(hash_operations(SMALL).values()).encode()).hexdigest()[:16]


def hash_operations(sizes: Sizes) -> dict[str, str]:
    """Return the hash of every operation's results, by its name."""
    return {name: hash_values(compute()) for name, compute in operations(sizes)}


def hash_values(values: object) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of arrays and tensors, one or many."""
    digest = hashlib.sha256()
    for value in values if isinstance(values, list | tuple) else [values]:
        array = (
            value.detach().contiguous().numpy()
            if isinstance(value, torch.Tensor)
            else np.ascontiguousarray(value)
        )
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draw float32 values in [-2, 2), the same everywhere: they are made of whole numbers."""
    values = np.random.Generator(np.random.PCG64(seed + sum(shape))).integers(
        -(2**24), 2**24, shape
    )
    return torch.from_numpy((values / 2**23).astype(np.float32))


def with_gradients(
    function: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> list[torch.Tensor]:
    """Return a function's result and the gradients of its inputs."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    result = function(*leaves)
    result.backward(draw(*result.shape, seed=99))
    return [result, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def operations(sizes: Sizes) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield every operation's name, and a function that computes it with the gradients needed."""
    yield from _products(sizes)
    yield from _images(sizes)
    yield from _attention_and_norms(sizes)
    yield from _functions(sizes)
    for fused in (False, True):
        yield f"AdamW, fused {fused}", partial(take_steps, fused)
    yield "random numbers of torch", draw_by_torch
    # numpy
    x = draw(10007).double().numpy()
    square = x[:10000].reshape(100, 100)
    yield (
        "functions of numpy",
        lambda: [np.exp(x), np.log(np.abs(x) + 0.1), np.tanh(x), (np.abs(x) + 0.1) ** 1.7],
    )
    yield (
        "sums of numpy",
        lambda: [
            x.sum(),
            x.std(),
            np.corrcoef(x[:5000], x[5000:10000]),
            np.quantile(x, [0.025, 0.975]),
        ],
    )
    yield "products of numpy", lambda: [square @ square, x @ x]
    yield (
        "random numbers of numpy",
        lambda: [
            np.random.default_rng(5).normal(size=1000),
            np.random.default_rng(5).permutation(100),
        ],
    )


def _products(sizes: Sizes) -> Iterator[tuple[str, Callable[[], object]]]:
    rows = sizes.rows
    for m, k, n in (
        (rows, 128, 128),
        (rows, 128, 512),
        (rows, 512, 128),
        (rows, 640, 128),
        (rows, 32, 128),
        (1, 64, 128),
        (12, 64, 128),
        (28, 64, 128),
    ):
        yield (
            f"linear {m}x{k}x{n}",
            partial(with_gradients, F.linear, draw(m, k), draw(n, k), draw(n)),
        )
    yield "gram 128x512", lambda: draw(128, 512) @ draw(128, 512).T
    yield "batched product", lambda: torch.bmm(draw(8, 28, 32), draw(8, 32, 28))
    yield (
        "product with a vector",
        lambda: [draw(128, 128) @ draw(128), torch.dot(draw(1000), draw(1000, seed=1))],
    )
    yield "product of float64", lambda: draw(64, 64).double() @ draw(64, 64).double()


def _images(sizes: Sizes) -> Iterator[tuple[str, Callable[[], object]]]:
    for name, channels, side, weights, options in (
        ("3x3 3->16", 3, 32, (16, 3, 3, 3), {"padding": 1}),
        ("3x3 32->32", 32, 16, (32, 32, 3, 3), {"padding": 1}),
        ("3x3 stride 2", 32, 17, (32, 32, 3, 3), {"stride": 2}),
        ("1x1", 16, 16, (32, 16, 1, 1), {}),
        ("patches", 3, 32, (96, 3, 8, 8), {"stride": 8}),
    ):
        inputs = (
            draw(sizes.batch, channels, side, side),
            draw(*weights, seed=1),
            draw(weights[0], seed=2),
        )
        yield f"convolution {name}", partial(with_gradients, partial(F.conv2d, **options), *inputs)
    yield (
        "resize",
        lambda: F.interpolate(draw(2, 3, 32, 32), (28, 28), mode="bicubic", antialias=True),
    )


def _attention_and_norms(sizes: Sizes) -> Iterator[tuple[str, Callable[[], object]]]:
    for tokens, heads in ((28, 4), (17, 3), (12, 2)):
        inputs = (draw(sizes.batch, heads, tokens, 32, seed=seed) for seed in (1, 2, 3))
        yield (
            f"attention {tokens}",
            partial(with_gradients, F.scaled_dot_product_attention, *inputs),
        )
    yield "softmax", partial(with_gradients, partial(torch.softmax, dim=-1), draw(8, 4, 28, 28))
    yield "log softmax", lambda: draw(8, 1000).log_softmax(-1)
    for width in (64, 128):
        norm = partial(torch.layer_norm, normalized_shape=(width,), eps=1e-6)
        of_weights = lambda x, w, b, norm=norm: norm(x, weight=w, bias=b)
        yield (
            f"layer norm {width}",
            partial(
                with_gradients,
                of_weights,
                draw(sizes.rows, width),
                draw(width),
                draw(width, seed=1),
            ),
        )
    of_groups = lambda x, w, b: F.group_norm(x, 8, w, b, 1e-6)
    yield (
        "group norm",
        partial(
            with_gradients, of_groups, draw(sizes.batch, 32, 16, 16), draw(32), draw(32, seed=1)
        ),
    )


def _functions(sizes: Sizes) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield functions of values in order and across memory, and sums."""
    x, positive = draw(33, sizes.rows), draw(33, sizes.rows).abs() + 0.1
    for function in (
        torch.exp,
        torch.sin,
        torch.tanh,
        torch.erf,
        F.gelu,
        F.silu,
        torch.square,
        torch.expm1,
    ):
        yield function.__name__, partial(_every_way, function, x)
    for function in (torch.sqrt, torch.rsqrt, torch.log, torch.reciprocal):
        yield function.__name__, partial(_every_way, function, positive)
    yield "power", partial(_every_way, partial(torch.pow, exponent=1.7), positive)
    for dim in (None, 0, 1):
        yield f"sums {dim}", partial(_sums, draw(sizes.rows, 257), dim)


def _every_way(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> list[torch.Tensor]:
    return [*with_gradients(function, x), function(x.T), function(x.double())]


def _sums(x: torch.Tensor, dim: int | None) -> list[torch.Tensor]:
    return [x.sum(dim), x.mean(dim), x.std(dim), torch.linalg.vector_norm(x, dim=dim)]


def take_steps(fused: bool) -> list[torch.Tensor]:
    """Take three steps of AdamW, with gradients clipped by their norm; return the weights."""
    weights = [torch.nn.Parameter(draw(*shape, seed=4)) for shape in ((128, 128), (128,), (7,))]
    optimizer = torch.optim.AdamW(weights, 1e-3, weight_decay=0.01, fused=fused)
    for step in range(3):
        for weight in weights:
            weight.grad = draw(*weight.shape, seed=10 + step)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    return list(weights)


def draw_by_torch() -> list[torch.Tensor]:
    """Draw numbers of every kind that training draws, from one seed."""
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(n, generator=generator) for n in (3, 15, 16, 1000)]
    drawn += [
        torch.rand(1000, generator=generator),
        torch.randint(8192, (1000,), generator=generator),
    ]
    return [*drawn, torch.randperm(1000, generator=generator)]


if __name__ == "__main__":
    portable.use("portable")
    echo(fingerprint())
