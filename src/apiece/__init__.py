"""Apiece: personalized federated learning that ends with a good model apiece."""
