"""Measuring and checking: benchmarks, fleet simulation, parity verification, machine diagnosis."""
