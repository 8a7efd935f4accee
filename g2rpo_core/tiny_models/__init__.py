"""Build and train small models for profiles such as `tiny`: a base model, a scorer per reward."""
