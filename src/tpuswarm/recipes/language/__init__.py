"""What all language models share: text, tokenizers, rows of tokens, the loss, the optimizer, published files."""
