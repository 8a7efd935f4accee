"""Fetches published models and prompts from the hub, checks them, and converts pickled ones."""
