"""Fetch published models and prompts from the Hugging Face hub, check them, and convert pickled checkpoints."""
