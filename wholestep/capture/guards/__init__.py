"""What must still hold for a captured program to serve a call, and the generated function that checks it."""
