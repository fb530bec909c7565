"""Sequences become windows: samplers, packing into micro-batches, loaders that resume."""
