"""Attention that cannot train or mask, and weights without a gradient, are refused at once."""

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch._subclasses.fake_tensor import FakeTensorMode

from g2rpo_core.architectures.table import ARCHITECTURES
from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.cost import make_transformer
from g2rpo_core.models.loading import check_attention
from g2rpo_core.models.policy import Policy
from tests.fixtures.errors import refused
from tests.fixtures.rollouts import small_method

HOW = {"height": 32, "width": 32, "guidance": 3.5}
CPU, SLOT = (
    torch.device("cpu"),
    AttentionBackendName.SAGE,
)  # whose package is not here: stand-ins take its name


def attended(query, key, value, attn_mask=None):
    return F.scaled_dot_product_attention(
        *(each.transpose(1, 2) for each in (query, key, value)), attn_mask
    ).transpose(1, 2)


@torch.no_grad()
def only_infers(query, key, value, attn_mask=None):
    """As kernels without a backward are called: by sage, or a hub's."""
    return attended(query, key, value, attn_mask)


def takes_no_mask(query, key, value, attn_mask=None):
    if attn_mask is not None:
        raise ValueError("`attn_mask` is not supported")
    return attended(query, key, value)


def overlooks_masks(query, key, value, attn_mask=None):
    return attended(query, key, value)


def has_half_a_backward(query, key, value, attn_mask=None):
    return attended(query, key.detach(), value, attn_mask)


def has_a_backward_of_zeros(query, key, value, attn_mask=None):
    made = attended(query, key, value, attn_mask)
    return made.detach() + 0 * made


def has_no_numbers(query, key, value, attn_mask=None):
    return attended(query, key, value, attn_mask) * float("nan")


@pytest.fixture
def backend(monkeypatch):
    """backend(function) -> the name under which diffusers calls it, registered as its own are."""
    for store in ("_backends", "_constraints", "_supported_arg_names"):
        monkeypatch.setattr(
            _AttentionBackendRegistry, store, dict(getattr(_AttentionBackendRegistry, store))
        )
    monkeypatch.setattr(
        "diffusers.models.attention_dispatch._check_attention_backend_requirements",
        lambda backend: None,
    )

    def register(function) -> str:
        _AttentionBackendRegistry.register(SLOT)(function)
        return SLOT.value

    return register


TRAINED = {
    only_infers: "returns no gradients",
    has_half_a_backward: "returns no gradients",
    has_a_backward_of_zeros: "computes other gradients than the native one",
    has_no_numbers: "computes other attention than the native one",
}


@pytest.mark.parametrize("function", TRAINED)
def test_a_backend_that_cannot_train_is_refused_for_training(backend, function):
    name = backend(function)
    with refused(f"sampling.attention: {name} {TRAINED[function]}.*: set it to null"):
        check_attention(name, CPU, torch.bfloat16, masked=False, trained=True)
    if function is not has_no_numbers:
        check_attention(name, CPU, torch.bfloat16, masked=True, trained=False)  # images are right


@pytest.mark.parametrize(
    "function, why",
    [
        (takes_no_mask, "cannot be used here under the mask"),
        (overlooks_masks, "computes other attention"),
    ],
)
def test_a_backend_without_masks_is_refused_for_bases_that_mask(backend, function, why):
    name = backend(function)
    check_attention(name, CPU, torch.float32, masked=False, trained=True)
    for trained in (True, False):
        with pytest.raises(UserError, match=f"{name} {why}"):
            check_attention(name, CPU, torch.float32, masked=True, trained=trained)


def test_a_backend_is_that_of_one_policy_alone(backend, models):
    """diffusers makes the last one set the default of all models, also of a base beside a run."""
    before = _AttentionBackendRegistry.get_active_backend()
    Policy.load(models / "pipeline", **HOW, attention=backend(has_half_a_backward))
    assert _AttentionBackendRegistry.get_active_backend() == before


def test_a_trained_weight_without_a_gradient_ends_a_run_before_its_first_step(
    make_trainer, monkeypatch
):
    """However that came: here a layer whose output is detached."""
    trainer = make_trainer(small_method("g2rpo"))
    before = {name: each.clone() for name, each in trainer.policy.trained_parameters().items()}
    trainer.policy.transformer.context_embedder.register_forward_hook(
        lambda _, __, output: output.detach()
    )
    with pytest.raises(
        UserError,
        match=r"context_embedder\.weight and 1 others got no gradient from the first backward pass",
    ):
        trainer.iterate(0)
    assert all(
        torch.equal(each, before[name])
        for name, each in trainer.policy.trained_parameters().items()
    )


@pytest.mark.parametrize(
    "repo", [repo for base in ARCHITECTURES.values() for repo in base.published]
)
def test_the_weights_without_a_gradient_are_those_that_are_listed(repo):
    """At the published shapes, with fewer blocks."""
    base = next(base for base in ARCHITECTURES.values() if repo in base.published)
    config, _ = base.shallow(base.published[repo].transformer)
    with torch.device("meta"):
        transformer = make_transformer(base, config, None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        transformer.to_empty(device="cpu")
        base.complete(transformer)
        made = transformer(**base.inputs(config, 1, 64, 32, "cpu"))[0]
        (torch.stack(made) if isinstance(made, list) else made).square().sum().backward()
    lacking = {name for name, each in transformer.named_parameters() if each.grad is None}
    idle = base.idle(config)
    assert lacking == {
        name for name, _ in transformer.named_parameters() if idle and name.startswith(idle)
    }
