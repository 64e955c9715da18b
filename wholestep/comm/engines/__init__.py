"""What moves bytes between ranks: shared memory, torch.distributed's engines, threads, and several hosts as both."""
