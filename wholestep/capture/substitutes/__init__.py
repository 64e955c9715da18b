"""What takes the place of real tensors and numbers while a step is traced, and how the real ones come back."""
