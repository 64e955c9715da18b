"""What a step asks of the world outside of its arguments: clocks, files, settings of torch, schedulers, iterators."""
