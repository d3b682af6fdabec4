"""The training loop, its optimizer and schedule, and what it tells the user."""
