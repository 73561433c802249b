"""Benchmarks: how fast train.py is here, beside another implementation and beside the machine's own ceiling.

python -m bench.throughput --suite models
python -m bench.roofline config/full_qwen3_1.8b_optimal.py
python -m bench.peer config/full_qwen3_1.8b_optimal.py --max_iters=31 --log_interval=5 --eval_interval=0
"""
