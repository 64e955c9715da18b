"""Which calls run together and in which order: elementwise chains, tiles, blocks of rows."""
