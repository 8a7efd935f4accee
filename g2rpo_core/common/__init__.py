"""Holds what many packages share: seeds, devices, names of runs, the model store, DVC's lock."""
