"""Writes the program: one line of Python for each kernel, from a memory plan."""
