"""Evaluation: samples the test prompts with trained weights, scores the images, and keeps the scores."""
