"""What ends or endangers a run: the watchdog, liveness and consensus of ranks, stragglers, anomalies in loss
and gradients, replicas that differ. It may import records/ and everything below it.
"""
