"""Stages at true size on simulated GPUs, with a meter instead of data.

Experimental: main works without it.
"""
