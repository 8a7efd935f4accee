"""Base models: everything that depends on their classes, from prompt encoding to the velocity."""
