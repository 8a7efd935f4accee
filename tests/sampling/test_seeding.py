"""Noise by name: hashes of weights and scores hang on these numbers."""

import torch

from g2rpo_core.sampling.seeding import generator, seed_of

SEED = 6230882969046613121  # of rollout/3/noise, by hashlib alone


def test_a_seed_is_the_first_63_bits_of_the_names_hash():
    assert seed_of("rollout", 3, "noise") == SEED and 0 <= SEED < 2**63


def test_parts_are_told_apart_and_numbers_are_their_digits():
    assert seed_of("a", "b") != seed_of("b", "a") and seed_of("a", 1) == seed_of("a", "1")


def test_a_generator_depends_on_its_name_alone():
    torch.manual_seed(1)
    first = torch.rand(4, generator=generator("noise", 7))
    torch.manual_seed(2)
    torch.rand(100)
    assert torch.equal(first, torch.rand(4, generator=generator("noise", 7)))
    assert not torch.equal(first, torch.rand(4, generator=generator("noise", 8)))
