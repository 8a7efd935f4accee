"""Evaluation: samples the test prompts with trained weights, and scores the images."""
