"""Estimate memory, time, communication and disk of a profile by arithmetic and tracing."""
