"""Measures how fast train.py is on this machine: compared with another implementation, and with the ceiling
that the machine's own matmuls and attention set. May import all packages but tools/.

    python -m bench.throughput --suite models
    python -m bench.roofline config/full_qwen3_1.8b_optimal.py
    python -m bench.peer config/full_qwen3_1.8b_optimal.py --max_iters=31 --log_interval=5 --eval_interval=0
"""
