"""What outlives a traced step: results, state outputs, state made in the first step, and leaks."""
