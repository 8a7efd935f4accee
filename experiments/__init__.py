"""Experiments that depend on the core, which never depends on them: the budget study of docs/findings.md."""
