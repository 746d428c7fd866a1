"""How starved a trainer is, and how much an echo would gain."""
