"""The trained model: loads, spreads and samples a transformer with its VAE as one policy."""
