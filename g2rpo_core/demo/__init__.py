"""`g2rpo demo`: a page that draws a prompt with the base and with trained runs, side by side, and scores the images."""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
