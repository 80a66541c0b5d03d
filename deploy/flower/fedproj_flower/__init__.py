"""FedProj and other methods on Flower."""
