"""Hold everything that depends on the classes of a base model: encoding, packing, velocity, sigmas, published shapes."""
