"""What happens when a run is saved, killed or resumed.

save     checkpoint_callback decides when ──> checkpoint_io writes, manifest vouches for what was written
kill     signals notes the signal ──> checkpoint_callback saves after the update ──> exit code
resume   resume finds the newest checkpoint ──> settings compares ──> lock, folders keep other runs out
"""
