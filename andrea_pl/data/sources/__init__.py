"""Turns files, tables and the standard library into documents."""
