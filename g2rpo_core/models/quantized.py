"""Frozen weights under a LoRA in 8 or 4 bits; every call restores those of one layer at a time."""

from collections.abc import Iterable
from statistics import NormalDist
from typing import Literal

import torch

Kind = Literal["int8", "nf4"]
# Bits of a weight; nf4 with its share of a scale, int8 has a scale for each output
BITS: dict[Kind, float] = {"int8": 8, "nf4": 4.5}
BLOCK = 64  # weights of NF4 that share a scale
# Bytes for each weight of the layer that is restored: levels, the product in float32, its dtype
RESTORING = 12


def _nf4_levels() -> tuple[float, ...]:
    # Eight quantiles above 0, seven below: QLoRA's equation 4, with the ends of its appendix E
    end = 0.9677083
    quantiles = lambda count: [
        NormalDist().inv_cdf(end + (0.5 - end) * i / count) for i in range(count)
    ]
    above, below = quantiles(8), quantiles(7)
    return tuple(value / above[0] for value in sorted([*above, 0.0, *(-value for value in below)]))


NF4_LEVELS = _nf4_levels()
"""The 16 values of a weight in 4-bit NormalFloat, in [-1, 1], rising."""


class QuantizedLinear(torch.nn.Linear):
    """A linear layer with frozen weights in `kind`; it computes with the weights restored.

    They have their dtype again. int8: round(w / s), with s = max |w| / 127 of each output. nf4: the
    nearest of 16 levels times s = max |w| of 64 weights in a row (4-bit NormalFloat, QLoRA, arXiv
    2305.14314, without its double quantization).
    """

    def __init__(self, layer: torch.nn.Linear, kind: Kind, device: torch.device):
        super().__init__(
            layer.in_features, layer.out_features, layer.bias is not None, device="meta"
        )
        self.kind, self.dtype = kind, layer.weight.dtype
        codes, scales = (_int8 if kind == "int8" else _nf4)(
            layer.weight.detach().to(device).float()
        )
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.scales = torch.nn.Parameter(scales, requires_grad=False)
        levels = torch.tensor(NF4_LEVELS, device=device)
        # The two levels that each byte stands for
        self.register_buffer(
            "pairs",
            torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1),
            persistent=False,
        )
        if layer.bias is not None:
            self.bias = torch.nn.Parameter(layer.bias.detach().to(device), requires_grad=False)

    @property
    def W_q(self) -> torch.Tensor:
        """Return the codes, in HQQ's name: of such a layer PEFT's DoRA takes `dequantize()`."""
        return self.weight

    def dequantize(self) -> torch.Tensor:
        """Return the weights [out, in] that the layer computes with."""
        shape = (self.out_features, self.in_features)
        if self.kind == "int8":
            return (self.weight.float() * self.scales).to(self.dtype)
        return (
            (self.pairs[self.weight.int()].view(-1, BLOCK) * self.scales)
            .to(self.dtype)
            .flatten()[: shape[0] * shape[1]]
            .view(shape)
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _Product.apply(input, self)


class _Product(torch.autograd.Function):
    """A layer's output; the backward pass restores the weights again, so that they are not kept."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.dequantize(), layer.bias)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # No gradient for the weights: they are frozen, and a LoRA stands beside the layer
        return grad @ ctx.layer.dequantize().to(grad.dtype), None


def quantize(
    transformer: torch.nn.Module,
    blocks: Iterable[torch.nn.Module],
    kind: Kind,
    device: torch.device,
) -> None:
    """Replace the frozen linear layers of the blocks one by one; move the transformer to `device`.

    So the device never holds more than the quantized weights and one layer. Layers around the
    blocks keep their dtype.
    """
    for module, name, layer in frozen_layers(blocks):
        setattr(module, name, QuantizedLinear(layer, kind, device))
    transformer.to(device)


def frozen_layers(
    blocks: Iterable[torch.nn.Module],
) -> list[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    """Return (module, name, layer) of the blocks' linear layers without gradients, not a LoRA's."""
    modules = [module for block in blocks for module in block.modules()]
    return [
        (module, name, layer)
        for module in modules
        for name, layer in module.named_children()
        if isinstance(layer, torch.nn.Linear) and not layer.weight.requires_grad
    ]


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # clamp_min: a row of zeros would be divided by 0
    scales = weight.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (weight / scales).round().to(torch.int8), scales


def _nf4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Padded with zeros, which `dequantize` cuts off: weights need not fill the last block
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    levels = torch.tensor(NF4_LEVELS, device=weight.device)
    codes = (
        torch.bucketize(blocks / scales, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).flatten()
    )
    return codes[::2] << 4 | codes[1::2], scales
