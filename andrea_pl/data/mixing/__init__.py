"""Which source the next sequences come from: mixtures, and the curriculum that runs them phase by phase."""
