"""Reports what a run does: the start-up report, log rows and their clock, the run record and its earlier
attempts, utilization. It may import what stands below it.
"""
