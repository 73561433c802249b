"""Saves checkpoints during training; verifies, keeps and loads them; chooses the one to resume from. It may
import optimization/ and everything below it.
"""
