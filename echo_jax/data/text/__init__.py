"""From texts and tokens to the sequences that a language model reads."""
