"""Images on the host: decoding and augmentation."""
