"""Decides which source the next sequences come from: mixtures, and the curriculum that runs their phases."""
