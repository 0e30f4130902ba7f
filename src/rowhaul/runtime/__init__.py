"""Carries out plans: moves, caches, gradient buffers and steps of one rank."""
