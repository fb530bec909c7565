"""Turns sequences into windows: samplers, packing into micro-batches, resumable loaders."""
