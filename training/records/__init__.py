"""What a run says: the start-up report, log rows and their clock, the run record and its earlier attempts,
utilization, the tracker. It may import cuda_graphs/ and everything below it.
"""
