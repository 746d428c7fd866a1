"""Text on the host: windows of tokens for language models."""
