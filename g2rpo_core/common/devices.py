"""The device that a command works on."""

import torch

from g2rpo_core.errors import UserError


def device_of(word: str | None) -> torch.device:
    """The device that a user named as torch does, or by default a GPU if there is one, else the CPU.

    UserError if torch knows no such device, or finds none here.
    """
    try:
        device = torch.device(word or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UserError(f"--device {word}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {word}: torch finds {torch.cuda.device_count() or 'no'} GPU here")
    return device
