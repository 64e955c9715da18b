"""What a step can see before it runs: the walk over objects, a handler for each type, and the snapshot it fills."""
