"""Hydra config tree, read as pkg://forge.configs."""
