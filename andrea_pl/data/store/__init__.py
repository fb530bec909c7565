"""Turns documents into tokens on disk: tokenizer, token stores, and the text of resumed runs."""
