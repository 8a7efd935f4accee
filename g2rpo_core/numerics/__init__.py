"""Computes the same bits on every x86-64 processor with AVX2: pins of the instruction set, two replacements, and a probe."""
