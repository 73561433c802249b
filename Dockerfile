# nanoMFU on NVIDIA GPUs; the host needs driver 580 or newer and the NVIDIA Container Toolkit:
#   docker build -t nanomfu .
#   docker run --rm --gpus all --shm-size=8g nanomfu
# Mount a folder for what a run writes: -v "$PWD/runs:/nanoMFU/runs", and --out_dir=runs/NAME.
FROM python:3.12-slim
# Triton compiles with gcc; a run record asks git for the commit.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev git make
WORKDIR /nanoMFU
COPY requirements.txt .
RUN pip install -r requirements.txt
COPY . .
RUN python data/quickstart/prepare.py
CMD python train.py config/full_qwen3_1.8b_optimal.py --dataset=quickstart --max_iters=20 --eval_interval=0 --always_save_checkpoint=False
