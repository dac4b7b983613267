"""Commands that measure: benchmarks, load tests, simulations, profiles, calibration and their reports."""
