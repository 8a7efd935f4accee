"""Stages at true size on simulated GPUs, with a meter instead of data."""
