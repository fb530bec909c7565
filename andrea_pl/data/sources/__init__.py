"""Files, tables, the standard library: anything with text in it becomes documents."""
