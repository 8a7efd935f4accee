"""Build and train the small models of profiles such as `tiny`: a base model and one scorer per learned reward."""
