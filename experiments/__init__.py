"""Experiments: the budget study of docs/findings.md. They depend on the core, never the other way round."""
