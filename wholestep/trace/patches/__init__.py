"""What of Python and torch is patched, in the tracing thread alone, while a step is traced."""
