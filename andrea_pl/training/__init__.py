"""The update, for any network: token-averaged gradients, one clip, one step, one report.

module         the seven steps of an update, to be read from top to bottom
accumulation   tokens of a window, and its micro-batches forward and backward
verdict        whether an update may change weights, and what its outcome is
checks         options of Trainer, strategy and optimizer that cannot work here
"""
