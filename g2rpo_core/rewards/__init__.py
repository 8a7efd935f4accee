"""Score images: the built-in rewards, a user's own class, and rewards computed by a server."""
