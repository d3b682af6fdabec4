"""Reinforcement learning beside a generation engine: weights to the engine, training state to the host and back."""
