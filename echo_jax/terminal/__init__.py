"""What a command says while it runs, and how it ends."""
