"""Draw any prompt with the base and with trained runs, score the images, and export weights, for the commands of `g2rpo`."""
