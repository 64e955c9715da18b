"""Key-value stores that ranks meet over: in a process, over a file, over TCP, and torch's own."""
