"""Attention that cannot train or mask, and weights without a gradient, are refused at once."""

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

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


def overlooks_masks(query, key, value, attn_mask=None):
    return attended(query, key, value)


def has_a_backward_of_zeros(query, key, value, attn_mask=None):
    made = attended(query, key, value, attn_mask)
    return made.detach() + 0 * made


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
    has_a_backward_of_zeros: "computes other gradients than the native one",
}


@pytest.mark.parametrize("function", TRAINED)
def test_a_backend_that_cannot_train_is_refused_for_training(backend, function):
    name = backend(function)
    with refused(f"sampling.attention: {name} {TRAINED[function]}.*: set it to null"):
        check_attention(name, CPU, torch.bfloat16, masked=False, trained=True)
    check_attention(name, CPU, torch.bfloat16, masked=True, trained=False)  # images are right


def test_a_backend_without_masks_is_refused_for_bases_that_mask(backend):
    name = backend(overlooks_masks)
    check_attention(name, CPU, torch.float32, masked=False, trained=True)
    with refused(f"{name} computes other attention"):
        check_attention(name, CPU, torch.float32, masked=True, trained=False)


def test_a_backend_is_that_of_one_policy_alone(backend, models):
    """diffusers makes the last one set the default of all models, also of a base beside a run."""
    before = _AttentionBackendRegistry.get_active_backend()
    Policy.load(models / "pipeline", **HOW, attention=backend(only_infers))
    assert _AttentionBackendRegistry.get_active_backend() == before


def test_a_trained_weight_without_a_gradient_ends_a_run_before_its_first_step(
    make_trainer, monkeypatch
):
    """However that came: here a layer whose output is detached."""
    trainer = make_trainer(small_method("g2rpo"))
    before = [each.clone() for each in trainer.policy.trained_parameters().values()]
    trainer.policy.transformer.context_embedder.register_forward_hook(
        lambda _, __, output: output.detach()
    )
    with refused(r"context_embedder\.weight and 1 others got no gradient from the first backward"):
        trainer.iterate(0)
    assert all(map(torch.equal, trainer.policy.trained_parameters().values(), before))
