"""Aligns flow-matching text-to-image models with online RL: G²RPO and baselines on one engine."""

import os

# onnxruntime, which diffusers and the reward `ocr` import, reports to its maker from 1.29 on unless
# this is set before
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
