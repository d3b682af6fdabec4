"""The training loop, and what it tells the user."""
