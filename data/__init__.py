"""Captioned images and feature caches: everything between the disk and the training loop."""
