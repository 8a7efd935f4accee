"""Computes the same bits on every x86-64 processor with AVX2: pins and replacements."""
