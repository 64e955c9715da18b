"""What a user asks for along the axes of a mesh, and the passes and sharding constraints that follow from it."""
