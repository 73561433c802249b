"""Checkpoints: what is in one, writing it beside the training, verifying, keeping and loading it, choosing
the one to resume from. It may import optimization/ and everything below it.
"""
