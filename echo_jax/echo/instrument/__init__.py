"""How starved a trainer is, and what an echo would give: measured and simulated."""
