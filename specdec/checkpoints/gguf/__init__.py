"""GGUF files: their headers and tensors, and the small files that are made from them."""
