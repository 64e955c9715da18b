"""The recorder: a dispatch mode, the graph it writes, its placeholders, and one traced run from start to end."""
