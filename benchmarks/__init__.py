"""Measures, nothing else: what is told in README.md beside this file."""
