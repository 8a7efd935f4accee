"""Aligns flow text-to-image models by online RL: G²RPO and its baselines on one engine."""
