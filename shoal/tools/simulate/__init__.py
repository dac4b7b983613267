"""Discrete-event simulation of fleets: the real scheduler and routing strategies on a simulated clock."""
