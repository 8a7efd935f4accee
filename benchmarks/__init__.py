"""Measure speed, memory and differences. README.md in this folder explains each benchmark."""
