"""Finds the fastest settings of a config on this machine: climbs a ladder of settings, each tried in a short
run of train.py, and writes the best as a config. It may import bench/ and everything below it.
"""
