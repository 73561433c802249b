"""Experiment trackers: what a run record gets, Weights & Biases, TensorBoard and trackio get, too. It may
import configuration/, process/ and common/."""
