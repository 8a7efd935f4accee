"""Samples: sigmas, steps with and without noise, and trees of model calls in full batches."""
