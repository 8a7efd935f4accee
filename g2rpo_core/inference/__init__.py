"""What trained weights are used for: draw prompts, score images, export weights."""
