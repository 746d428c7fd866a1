"""What an image goes through on the host, from the bytes of its file on."""
