"""The parts of an update: its gradient, its optimizer, and its precision."""
