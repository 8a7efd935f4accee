"""What a GPU alone is told: switches of PyTorch that a CPU build has, too."""

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.models.policy import Policy
from g2rpo_core.numerics.cuda import NEUTRAL, WITHOUT_BACKWARD, prepare

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def cudnn_attention():
    """Whether PyTorch may choose cuDNN's attention, as it may at first; restored."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield torch.backends.cuda.cudnn_sdp_enabled
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_gpu_never_computes_attention_by_cudnn(cudnn_attention):
    assert prepare(CPU) == CPU and cudnn_attention()
    assert prepare(CUDA) == CUDA and not cudnn_attention()
    others = (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.math_sdp_enabled)
    assert all(enabled() for enabled in others)


def test_an_environment_that_changes_numbers_unseen_is_refused_or_overruled(monkeypatch):
    for name, value in NEUTRAL.items():
        monkeypatch.setenv(name, value)
        prepare(CPU)
        monkeypatch.setenv(name, "other")
        with pytest.raises(UserError, match=f"{name}: is 'other' in the environment"):
            prepare(CPU)
        monkeypatch.delenv(name)
    torch.set_float32_matmul_precision("high")  # as NVIDIA's images set it at the start
    prepare(CUDA)
    assert torch.get_float32_matmul_precision() == "highest"


def test_nothing_is_trained_by_an_attention_with_a_wrong_backward(models):
    assert set(WITHOUT_BACKWARD) <= {backend.value for backend in AttentionBackendName}
    with pytest.raises(
        UserError, match="sampling.attention: nothing is trained with _native_cudnn"
    ):
        Policy.load_to_train(
            models / "pipeline", height=32, width=32, guidance=3.5, attention="_native_cudnn"
        )
