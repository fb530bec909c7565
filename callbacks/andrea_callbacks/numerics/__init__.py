"""Numbers and bytes without Lightning's Trainer: norms, transfers, random states, atomic writes.

Nothing here imports another room of andrea_callbacks.
"""
