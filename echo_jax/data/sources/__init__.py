"""Records by index: of a prepared folder, of other people's files, or drawn."""
