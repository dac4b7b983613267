"""Fleets that are not there yet: the real scheduler and routing strategies, on a clock that is only counted."""
