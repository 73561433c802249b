"""Finds the fastest settings of a config on this machine: the options, the settings that fit, the ladder, the
trials, and the config that is written."""
