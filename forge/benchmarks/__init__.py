"""What `forge bench NAME` runs: one module for each NAME, whose `run(config)` measures and returns claims."""
