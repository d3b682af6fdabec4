"""Rollout engines: the embedded one, and servers of vLLM and SGLang."""
