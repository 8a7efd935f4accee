"""Studies: matrices of runs with a report of their own, each a folder with a params.yaml.

`python -m studies` runs and makes them.

Experimental: main works without it.
"""
