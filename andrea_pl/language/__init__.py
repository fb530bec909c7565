"""The language model as a Lightning module: network, loss, optimizer and schedule, evaluation, export."""
