"""Record sources: prepared folders and third-party datasets."""
