"""What made an update bad: detection, replay, attribution to sequences, and the report."""
