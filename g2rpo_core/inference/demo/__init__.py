"""The page of `g2rpo demo`: prompts drawn with the base and trained runs, scored, and voted on.

Experimental: main works without it.
"""

import os
import tempfile

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported, as the next one
# Removed at this process's end
_CACHE = tempfile.TemporaryDirectory(prefix="g2rpo-demo-", dir=os.environ.get("GRADIO_TEMP_DIR"))
os.environ["GRADIO_TEMP_DIR"] = _CACHE.name
