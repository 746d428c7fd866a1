"""What an update computes: its gradient, its optimizer, in which precision."""
