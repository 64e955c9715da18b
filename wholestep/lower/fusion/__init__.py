"""Which calls run together and in which order: elementwise chains, blocks of rows."""
