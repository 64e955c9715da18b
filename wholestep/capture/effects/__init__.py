"""What a step changed in the Python world, as data, and the code that does it again at each call."""
