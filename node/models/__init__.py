"""Catalogue of the models on the disk of this machine, and the embedded model `macpool-tiny`."""
