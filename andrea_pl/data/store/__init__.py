"""Documents become tokens on disk: tokenizer, token stores, and what a resume needs of them."""
