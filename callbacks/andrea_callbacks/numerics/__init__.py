"""Numbers and bytes without Lightning's Trainer: norms, transfers, random states, atomic writes.

Nothing here imports another package of andrea_callbacks.
"""
