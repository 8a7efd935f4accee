"""Estimate what a profile needs before any machine is rented: memory, time, communication, disk, by arithmetic and tracing."""
