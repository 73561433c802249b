"""Text from a model: a key/value cache, the loop that makes tokens, the choice of each, and ids to text. It
imports model.py, ops/, data/ and common/; sample.py and tools/ import it."""
