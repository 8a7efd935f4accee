"""Named random numbers: a generator depends on its purpose, never on rank, order or batch size."""

import hashlib

import torch


def seed_of(*parts: str | int) -> int:
    """Return a 63-bit seed from the SHA-256 of the parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(*parts: str | int) -> torch.Generator:
    """Return a CPU generator (the same numbers on every device) seeded by `seed_of(*parts)`."""
    return torch.Generator().manual_seed(seed_of(*parts))
