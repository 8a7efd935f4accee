"""Holds what everything else stands on: errors, files, texts from outside, and typed settings."""
