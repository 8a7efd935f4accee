"""Aligns flow-matching text-to-image models with online RL: G²RPO and baselines on one engine."""

import os
import sys

# onnxruntime, which diffusers and the reward `ocr` import, reports to its maker from 1.29 on unless
# this is set before
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# transformers, diffusers and altair read docstrings when they are imported
if sys.flags.optimize > 1:
    sys.exit(
        "error: PYTHONOPTIMIZE=2 (python -OO) removes docstrings that libraries need: unset it"
    )

# Here, and not once torch is imported: a launcher may be killed in these seconds
if os.environ.get("G2RPO_LAUNCHER") == str(os.getppid()):
    from g2rpo_core.numerics.parent import die_with_parent

    die_with_parent(os.getppid())
